"""Fleets that nobody has at hand, event by event.

Coding agents (`workload`, or a trace of one's own), engines by a device's curve (`engines`), the
choices that a router can make (`policies`) and what it keeps for them (`router_state`). Nothing
is computed by a model and nothing reads a clock: the same seed gives the same figures anywhere.
`docs/benchmarks/fleet-simulation.md` lists what is assumed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from imagined_device import without_device
from mlx_provider.errors import BadRequest
from mlx_provider_bench.report import Result, print_rows
from simulation.device import speed_of
from simulation.engines import Engines, Machine
from simulation.faults import Faults
from simulation.policies import POLICIES
from simulation.run import Run
from simulation.trace import read_trace
from simulation.workload import Shape, Workload, generate

TAIL = 6 * 3600.0
"""Seconds for which engines still die once no session begins."""


@dataclass(frozen=True)
class Plan:
    """What is simulated."""

    engines: Sequence[int] = (4, 16, 64)
    sessions: int = 60
    """For each engine."""
    per_hour: float = 4.0
    """New sessions in an hour, for each engine."""
    policies: Sequence[str] = tuple(POLICIES)
    chip: str = "M5 Max"
    model: str = "30B-A3B"
    cache_gb: float = 40.0
    disk_gb: float = 0.0
    disk_shared: bool = False
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    trace: Path | None = None
    shape: Shape = field(default_factory=Shape)


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr. Raises `BadRequest` for a wrong plan."""
    for name in plan.policies:
        if name not in POLICIES:
            raise BadRequest(f"{name!r} is none of {', '.join(POLICIES)}", param="policy")
    machine = Machine(
        speed_of(plan.chip, plan.model),
        cache_bytes=plan.cache_gb * 1e9,
        disk_bytes=plan.disk_gb * 1e9,
        disk_shared=plan.disk_shared,
    )
    rows: list[Result] = []
    for engines in plan.engines:
        workload = _workload(plan, engines)
        rows += [_row(plan, workload, machine, engines, name) for name in plan.policies]
    print_rows("a fleet by policy, simulated", COLUMNS, rows)
    return _about(plan) | {"rows": rows}


COLUMNS = {
    "engines": "engines",
    "policy": "policy",
    "sessions": "sessions",
    "requests": "requests",
    "hit rate": "hit_rate",
    "first token p50, s": "ttft_p50",
    "p95": "ttft_p95",
    "p99": "ttft_p99",
    "most loaded / mean": "imbalance",
    "moved": "moved_share",
    "router's items": "router_items",
    "pins evicted": "evicted",
    "run, s": "seconds",
}


def _workload(plan: Plan, engines: int) -> Workload:
    if plan.trace is not None:
        return read_trace(plan.trace)
    rate = plan.per_hour * engines / 3600
    return generate(plan.sessions * engines, rate, plan.seed, plan.shape)


def _row(plan: Plan, workload: Workload, machine: Machine, count: int, name: str) -> Result:
    began = time.perf_counter()
    policy = POLICIES[name](count, plan.seed)
    engines = Engines(count, machine, one_cache=policy.one_cache)
    span = workload.start[workload.sessions - 1] + TAIL
    faults = plan.faults.within(count, span, plan.seed)
    account = Run(workload, engines, policy, faults).done()
    row = account.row(name, engines, policy.memory)
    return row | {
        "sessions": workload.sessions,
        "seconds": round(time.perf_counter() - began, 2),
        "peak_mb": _peak() // 2**20,
    }


def _peak() -> int:
    """Bytes that this process has had at most."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _about(plan: Plan) -> Result:
    """What the figures depend on; the machine's own speed is not of it."""
    told = vars(plan) | {"faults": vars(plan.faults), "shape": _plain(plan.shape)}
    about = without_device(f"{plan.chip} with {plan.model}, simulated")
    return about | {"plan": told | {"trace": None if plan.trace is None else plan.trace.name}}


def _plain(shape: Shape) -> Result:
    return {
        name: vars(value) if hasattr(value, "__dict__") else value
        for name, value in vars(shape).items()
    }
