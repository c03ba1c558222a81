"""Keeps the limit of open files, which the import of mlx_lm lowers (mlx_lm/utils.py 0.32.2)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def file_limit_kept() -> Iterator[None]:
    """To restore the limit afterwards would need a privilege: the hard limit is lowered, too."""
    original = resource.setrlimit

    def others_only(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE:
            original(kind, limits)

    resource.setrlimit = others_only
    try:
        yield
    finally:
        resource.setrlimit = original
