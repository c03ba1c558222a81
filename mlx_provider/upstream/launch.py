"""`python -m mlx_provider.upstream.launch`: `mlx.launch`, which waits instead of polling.

A thread for each process (mlx 0.32.4, `_distributed_utils/launch.py`, `_launch_with_io`) waits
until the process has written something, or could read. It nearly always could read, so the threads
keep a core of the first machine busy for as long as the group lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from select import select

PAUSE = 0.1
"""Seconds after which a thread checks whether its process has input."""

Files = Sequence[int]


def unhurried(
    read: Files, write: Files, odd: Files, limit: float = PAUSE
) -> tuple[list[int], list[int], list[int]]:
    """Like `select.select`, but does not wait until something is writable."""
    readable, _, failed = select(read, [], odd, min(limit, PAUSE))
    return readable, select([], write, [], 0)[1], failed


def main() -> None:
    from mlx._distributed_utils import launch

    vars(launch)["select"] = unhurried
    launch.main()


if __name__ == "__main__":
    main()
