"""The limit of open files of the process. Each connection is one."""

from __future__ import annotations

import resource
import sys

from ..errors import EngineUnavailable

LEAST_FILES = 48
"""For the engine, a model, and a few connections."""
WANTED = 2048


def open_files() -> int:
    """The present limit, which the import of mlx-lm (0.32, utils.py) changes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """To `WANTED`, or as far as allowed. Raises `EngineUnavailable` below `LEAST_FILES`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if most < LEAST_FILES:
        raise EngineUnavailable(
            f"this process may open {most} files and needs {LEAST_FILES}: start it under "
            f"`ulimit -n {WANTED}`"
        )
    if open_files() < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
