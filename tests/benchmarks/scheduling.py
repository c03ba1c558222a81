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
DEPTH = 2048
"""Tokens of the deep cache over which they pass."""
LOOSE, TIGHT = 0.1, 0.04
"""Stall targets, seconds."""
LONG, HELD = 60_000, 30_000
"""Tokens of a prompt and of each stream of an agent that works on many files."""
BRIEF = 500
"""Tokens of a prompt that comes while the long one is computed."""


@dataclass(frozen=True)
class Plan:
    """The models that this device is timed with."""

    hidden: int = 256
    layers: int = 6
    dtype: str = "float32"


def bench(plan: Plan) -> Result:
    """Simulate each device; JSON-able. A table goes to stderr."""
    rows = list(scheduler(plan))
    print_rows("a prompt beside streams", _TABLE, map(_shown, rows))
    missed = [row["what"] for row in rows if not row["reached"]]
    return surroundings(plan.dtype) | {"rows": rows, "missed": missed}


def scheduler(plan: Plan) -> Iterator[Result]:
    """A prompt beside streams, by device and model."""
    from device_curves import CHIPS, MODELS, Estimate

    for chip, speeds in CHIPS.items():
        for model, needs in MODELS.items():
            yield from _beside_streams(f"{chip}, {model}", Estimate(speeds, needs))
    for name, family in HERE.items():
        yield from _beside_streams(f"this device, {name}", timed(plan, family))


def _beside_streams(name: str, device: Any) -> Iterator[Result]:
    from device_curves import PROMPT, STREAM, pace_alone, simulate
    from mlx_provider.engine.scheduling.chunking import FAIR, LONGEST_GAP

    for prompt, held, least in ((LONG, HELD, 0.95), (PROMPT, STREAM, 0.9)):
        idle = simulate(device, 0, prompt=prompt).rate
        for streams, target in ((4, LOOSE), (1, LOOSE), (1, TIGHT)):
            found = simulate(device, streams, target, prompt=prompt, held=held, brief=BRIEF)
            alone = pace_alone(device, streams, held)
            rate, pace = found.rate / idle, found.pace / alone
            what = f"{name}: {prompt:,} beside {streams} of {held:,} at {target:g} s"
            more = {
                "prompt": round(rate, 2), "pace": round(pace, 2), "gap": round(found.worst, 3),
                "first": round(found.first, 2), "idle_rate": idle,
            }  # fmt: skip
            yield _row(f"{what}: share", rate + pace, at_least=least, **more)
            fair = max(target, FAIR / alone)
            yield _row(f"{what}: a token", 1 / found.pace, at_most=round(1.02 * fair, 4))
            smallest = device.seconds(0, 0, device.grid, prompt) + 1 / alone
            longest = max(target, LONGEST_GAP, smallest)
            yield _row(f"{what}: longest gap", found.worst, at_most=round(1.05 * longest, 4))


def timed(plan: Plan, family: str) -> Any:
    """This device with a random model: what its passes take, and what the engine knows of it."""
    from device_curves import Timed
    from mlx_provider.engine.execution.calibration import calibrate
    from mlx_provider.engine.execution.deep_cache import deep_cache
    from mlx_provider.engine.execution.probe import probe
    from mlx_provider.engine.scheduling.costs import Curve
    from mlx_provider.engine.scheduling.plan import GRID

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / family, family, plan.dtype, plan.hidden, plan.layers)
        model = load_model(path, plan.dtype)
        found = probe(model, model.make_cache, model.kv_layouts)
        known = calibrate(model, model.make_cache)
        deep_row = partial(deep_cache, model, model.make_cache, DEPTH, max(WIDTHS))
        short = [(n, _seconds(model, model.make_cache, 0, n)) for n in WIDTHS]
        deep = [(n, _seconds(model, deep_row, DEPTH, n)) for n in WIDTHS[::3]]
    grid = GRID if found.memory.recurrent else 1
    return Timed(Curve.through(short, deep, DEPTH), known, found.mixes, grid)


def _seconds(model: LoadedModel, cache: Callable[[], list[Any]], start: int, width: int) -> float:
    """The fastest of some passes over `width` tokens, each behind `start` in a cache of its own."""
    import mlx.core as mx

    from mlx_provider.engine.execution.deep_cache import spread
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
    "prompt": "prompt",
    "pace": "pace",
    "gap, s": "gap",
    "first token, s": "first",
    "idle tokens/s": "idle_rate",
}
