"""Several engines behind one proxy."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_provider_bench.commands import running


def fleet(
    engines: Annotated[
        list[int] | None, typer.Option(min=1, help="How many; repeat for several: 1, 2 and 4.")
    ] = None,
    agents: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 16,
    turns: Annotated[int, typer.Option(min=1, help="Of each conversation.")] = 4,
    prefill: Annotated[float, typer.Option(help="Seconds for a prompt that is not cached.")] = 1.0,
    apart: Annotated[float, typer.Option(help="Seconds between the starts of two agents.")] = 0.2,
    token: Annotated[float, typer.Option(help="Seconds for a token of an answer.")] = 0.01,
    policy: Annotated[
        str, typer.Option(help="affinity, or LiteLLM's least-busy or simple-shuffle alone.")
    ] = "affinity",
) -> None:
    """Throughput and hit rate of 1, 2 and 4 engines behind one proxy; their device sleeps."""
    running.preload()
    from fleet import Plan, bench

    counts = tuple(engines or (1, 2, 4))
    plan = Plan(counts, agents, turns, prefill=prefill, token=token, apart=apart, policy=policy)
    running.print_result(bench(plan))


def router(
    engines: Annotated[
        list[int] | None, typer.Option(min=1, help="How many; repeat for several: 10, 100, 1000.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="Each of which asks twice.")] = 300,
    redis: Annotated[str | None, typer.Option(help="A Redis that the router uses.")] = None,
) -> None:
    """Time and memory of LiteLLM's router by the number of engines under one name."""
    from litellm_router import Plan, bench

    running.print_result(bench(Plan(tuple(engines or Plan.engines), sessions, redis)))
