"""Turns of coding agents."""

from __future__ import annotations

from command_line import running
from mlx_provider_bench.report import print_rows

COLUMNS = {
    "session": "session",
    "setting": "setting",
    "result": "result",
    "prefilled": "prefilled",
    "passes to the call": "begun",
    "passes": "passes",
    "waits": "waits",
    "tokens": "tokens",
    "call here": "first_byte",
    "end here": "ended",
    "M3 Max first token": "devices.M3 Max.first_token",
    "call": "devices.M3 Max.first_byte",
    "end": "devices.M3 Max.ended",
    "M5 Max first token": "devices.M5 Max.first_token",
    "call ": "devices.M5 Max.first_byte",
    "end ": "devices.M5 Max.ended",
}


def agent_turn() -> None:
    """Seconds from a tool's result to the next call of recorded agents, each part on and off."""
    running.preload()
    from agent_turn import bench as measure

    result = measure()
    print_rows("Means of the turns after a result", COLUMNS, result["turns"])
    running.print_result(result)
