"""The scheduler on curves of devices, and on those of this one, timed closely, against targets.

No figure but those of this device depends on its speed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_provider.commands import load_model
from mlx_provider.records import LoadedModel, PrefillChunk, Prompt
from mlx_provider_bench.models.random_weights import write_model
from mlx_provider_bench.report import Result, print_rows, surroundings

HERE = {"dense": "llama", "hybrid": "qwen3_5"}
"""Random models that this device is timed with."""
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REPEATS = 5
"""Passes of each width, of which the fastest counts: others may be at work."""
LOOSE, TIGHT = 0.1, 0.04
"""Stall targets, seconds."""


@dataclass(frozen=True)
class Plan:
    """The models that this device is timed with."""

    hidden: int = 256
    layers: int = 6
    dtype: str = "float32"


def bench(plan: Plan) -> Result:
    """Simulate each device; JSON-able. A table goes to stderr."""
    rows = list(scheduler(plan))
    print_rows("a prompt of 16,000 tokens beside streams", _TABLE, map(_shown, rows))
    missed = [row["what"] for row in rows if not row["reached"]]
    return surroundings(plan.dtype) | {"rows": rows, "missed": missed}


def scheduler(plan: Plan) -> Iterator[Result]:
    """A prompt of 16,000 tokens beside streams, by device and model."""
    from device_curves import CHIPS, MODELS, Estimate

    for chip, speeds in CHIPS.items():
        for model, needs in MODELS.items():
            yield from _beside_streams(f"{chip}, {model}", Estimate(speeds, needs))
    for name, family in HERE.items():
        yield from _beside_streams(f"this device, {name}", timed(plan, family))


def _beside_streams(name: str, device: Any) -> Iterator[Result]:
    from device_curves import HOST, pace_alone, reachable, simulate

    idle = simulate(device, 0).rate
    one, four, tight = (
        simulate(device, 1, LOOSE),
        simulate(device, 4, LOOSE),
        simulate(device, 1, TIGHT),
    )
    row = partial(_row, idle_rate=idle)
    best = [reachable(device, *asked) / idle for asked in ((1, LOOSE), (4, LOOSE), (1, TIGHT))]
    yield row(f"{name}: prompt beside 1 stream", one.rate / idle, at_least=0.85, reachable=best[0])
    yield row(f"{name}: beside 4", four.rate / idle, at_least=0.7, reachable=best[1])
    gap = max(one.worst, four.worst)
    yield row(f"{name}: longest gap, s", gap, at_most=LOOSE + 2 * HOST)
    pace = tight.pace / pace_alone(device, 1)
    yield row(f"{name}: 40 ms, pace of 1 stream", pace, at_least=0.4)
    yield row(f"{name}: 40 ms, prompt", tight.rate / idle, at_least=0.5, reachable=best[2])


def timed(plan: Plan, family: str) -> Any:
    """This device with a random model: what its passes take, and what the engine knows of it."""
    from device_curves import Timed
    from mlx_provider.engine.execution.calibration import DEPTH, calibrate, deep_cache
    from mlx_provider.engine.execution.probe import probe
    from mlx_provider.engine.scheduling.costs import Curve
    from mlx_provider.engine.scheduling.plan import GRID

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / family, family, plan.dtype, plan.hidden, plan.layers)
        model = load_model(path, plan.dtype)
        found = probe(model, model.make_cache, model.kv_layouts)
        known = calibrate(model, model.make_cache)
        deep_row = partial(deep_cache, model, model.make_cache)
        short = [(n, _seconds(model, model.make_cache, 0, n)) for n in WIDTHS]
        deep = [(n, _seconds(model, deep_row, DEPTH, n)) for n in (1, 256)]
    grid = GRID if found.memory.recurrent else 1
    return Timed(Curve.through(short, deep, DEPTH), known, found.mixes, grid)


def _seconds(model: LoadedModel, cache: Callable[[], list[Any]], start: int, width: int) -> float:
    """The fastest of some passes over `width` tokens, each behind `start` in a cache of its own."""
    import mlx.core as mx

    from mlx_provider.engine.execution.calibration import spread
    from mlx_provider.engine.memory import arrays

    prompt, took = Prompt(spread(model, start + width)), []
    for _ in range(REPEATS):
        own = cache()
        began = time.perf_counter()
        mx.eval(model.prefill(PrefillChunk(prompt, start, start + width, own)), arrays(own))
        took.append(time.perf_counter() - began)
    return min(took)


def _row(
    what: str,
    found: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    **more: Any,
) -> Result:
    """A figure with one of two targets."""
    target: Result = {}
    if at_least is not None:
        target = {"at_least": at_least, "reached": found >= at_least}
    elif at_most is not None:
        target = {"at_most": at_most, "reached": found <= at_most}
    return {"what": what, "found": round(found, 4)} | target | more


def _shown(row: Result) -> Result:
    """The row of the table."""
    sign, wanted = ("≥", row["at_least"]) if "at_least" in row else ("≤", row["at_most"])
    return row | {"target": f"{sign} {wanted:g}", "ok": "ok" if row["reached"] else "MISSED"}


_TABLE = {
    "what": "what",
    "target": "target",
    "found": "found",
    "ok": "ok",
    "by the device alone": "reachable",
    "idle tokens/s": "idle_rate",
}
