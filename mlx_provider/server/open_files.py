"""How many files the process may have open: each connection is one."""

from __future__ import annotations

import resource
import sys

from ..errors import EngineUnavailable

LEAST = 48
"""Files for the engine's own, a model's, and a few connections."""
WANTED = 2048


def open_files() -> int:
    """How many the process may have open now. Importing mlx-lm (0.32, utils.py) sets it anew."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Let the process open `WANTED` files, or as many as it may.

    Raises `EngineUnavailable` where these are fewer than `LEAST`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if most < LEAST:
        raise EngineUnavailable(
            f"this process may open {most} files and needs {LEAST}: start it under "
            f"`ulimit -n {WANTED}`"
        )
    if open_files() < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
