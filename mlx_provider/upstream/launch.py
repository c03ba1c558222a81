"""`python -m mlx_provider.upstream.launch`: `mlx.launch` without busy waiting.

`mlx.launch` has a thread for each process (mlx 0.32.4, `_distributed_utils/launch.py`,
`_launch_with_io`), which waits until the process has written something or can read. A process can
nearly always read, so that these threads keep a core busy as long as the group runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from select import select

PAUSE = 0.1
"""Seconds between two checks of a thread for input to its process."""

Files = Sequence[int]


def unhurried(
    read: Files, write: Files, odd: Files, limit: float = PAUSE
) -> tuple[list[int], list[int], list[int]]:
    """Like `select.select`, but does not wait for a writable file."""
    readable, _, failed = select(read, [], odd, min(limit, PAUSE))
    return readable, select([], write, [], 0)[1], failed


def main() -> None:
    from mlx._distributed_utils import launch

    vars(launch)["select"] = unhurried
    launch.main()


if __name__ == "__main__":
    main()
