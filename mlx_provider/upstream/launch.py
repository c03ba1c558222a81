"""`python -m mlx_provider.upstream.launch`: `mlx.launch`, which waits instead of asking on and on.

A thread for each process (mlx 0.32.4, `_distributed_utils/launch.py`, `_launch_with_io`) waits
until the process has written something, or could read. It nearly always could read, so the threads
keep a core of the first machine busy for as long as the group lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from select import select

PAUSE = 0.1
"""Seconds after which a thread looks whether there is something for its process to read."""

Files = Sequence[int]


def unhurried(
    read: Files, write: Files, odd: Files, limit: float = PAUSE
) -> tuple[list[int], list[int], list[int]]:
    """As `select.select`, but that it does not wait for what can be written to."""
    readable, _, failed = select(read, [], odd, min(limit, PAUSE))
    return readable, select([], write, [], 0)[1], failed


def main() -> None:
    from mlx._distributed_utils import launch

    vars(launch)["select"] = unhurried
    launch.main()


if __name__ == "__main__":
    main()
