"""The limit of open files of the process. Each connection is one."""

from __future__ import annotations

import resource
import sys

from ..errors import EngineUnavailable

LEAST_FILES = 48
"""Files for the engine, a model, and a few connections."""
WANTED = 2048


def open_files() -> int:
    """The present limit. The import of mlx-lm (0.32, utils.py) changes it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raise the limit to `WANTED` files, or as far as allowed.

    Raises `EngineUnavailable` if the result is below `LEAST_FILES`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if most < LEAST_FILES:
        raise EngineUnavailable(
            f"this process may open {most} files and needs {LEAST_FILES}: start it under "
            f"`ulimit -n {WANTED}`"
        )
    if open_files() < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
