"""Measurements of the engine from inside, in this process."""

from __future__ import annotations

from command_line import running


def accounts() -> None:
    """How long a short prompt waits beside the flood of another account, on curves of devices."""
    running.preload()
    from accounts import bench as measure

    running.print_result(measure())


def gap() -> None:
    """The host's work in a step, and how long an imagined device waits for it."""
    running.preload()
    from host_gap import Plan
    from host_gap import bench as measure

    running.print_result(measure(Plan()))
