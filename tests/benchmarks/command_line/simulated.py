"""Fleets that nobody has at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_provider_bench.commands import running


def fleet_simulation(
    engines: Annotated[
        list[int] | None, typer.Option(min=1, help="How many; repeat for several: 4, 16 and 64.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Of agents, for each engine.")] = 60,
    per_hour: Annotated[
        float, typer.Option(min=0.01, help="New sessions in an hour, for each engine.")
    ] = 4.0,
    policy: Annotated[
        list[str] | None, typer.Option(help="Who chooses engines; repeat for several. All.")
    ] = None,
    chip: Annotated[str, typer.Option(help="Whose curve engines have.")] = "M5 Max",
    model: Annotated[str, typer.Option(help="Which model they have.")] = "30B-A3B",
    cache_gb: Annotated[float, typer.Option(min=0, help="Each one's prefix cache.")] = 40.0,
    disk_gb: Annotated[float, typer.Option(min=0, help="Of prefixes on a disk; 0: none.")] = 0.0,
    disk_shared: Annotated[
        bool, typer.Option("--disk-shared", help="One folder of that size for all.")
    ] = False,
    deaths: Annotated[float, typer.Option(min=0, help="Of each engine in a day.")] = 0.0,
    rolling: Annotated[
        float | None, typer.Option(min=0, help="Hours until all are restarted in turn.")
    ] = None,
    down: Annotated[float, typer.Option(min=1, help="Seconds that a restart takes.")] = 120.0,
    trace: Annotated[Path | None, typer.Option(help="Requests of your own, as JSON lines.")] = None,
    seed: Annotated[int, typer.Option(help="Of sessions and choices.")] = 0,
) -> None:
    """Hit rate and waiting by routing policy, for coding agents on many engines; all simulated."""
    running.preload()
    from fleet_simulation import Plan, bench
    from simulation.faults import Faults

    plan = Plan(
        engines=tuple(engines or Plan.engines),
        sessions=sessions,
        per_hour=per_hour,
        policies=tuple(policy or Plan.policies),
        chip=chip,
        model=model,
        cache_gb=cache_gb,
        disk_gb=disk_gb,
        disk_shared=disk_shared,
        faults=Faults(deaths, down, None if rolling is None else rolling * 3600),
        trace=trace,
        seed=seed,
    )
    running.print_result(bench(plan))
