"""`mlx-provider bench device`: what can be proven about a machine that one does not have.

(kernels) launches of a decode step, counted on the graph that it builds; (scheduler) our scheduler
on curves of devices, and on those of this one, timed closely; (allocator) what a cold prefill
allocates and copies by the rules of Metal's allocator; (noise) whether the probe tells the rounding
of kernels from errors of a layout. No figure but the curves of this device depends on its speed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_provider.records import LoadedModel, PrefillChunk, Prompt

from .models.random_weights import load, write_model
from .report import Result, print_rows, surroundings

SEEDS = range(6)
"""Of the models that the probe is tried on; the odd ones are in 4 bit."""
NOISES = (1e-6, 1e-3)
PROMPT, RESERVE = 32_000, 512
CHUNKS = (2048, 320)
PEAK = 1.3
"""Times weights and KV that a cold prefill may take."""
HERE = {"dense": "llama", "hybrid": "qwen3_5"}
"""Random models that this device is timed with."""
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REPEATS = 5
"""Passes of each width, of which the fastest counts: others may be at work."""
LOOSE, TIGHT = 0.1, 0.04
"""Stall targets, seconds."""


@dataclass(frozen=True)
class Plan:
    """What is shown, and the models that this device is timed with."""

    parts: Sequence[str]
    hidden: int = 256
    layers: int = 6
    dtype: str = "float32"


def bench(plan: Plan) -> Result:
    """Run the named parts; JSON-able. A table of each goes to stderr."""
    found = {part: list(PARTS[part](plan)) for part in plan.parts}
    for part, rows in found.items():
        print_rows(part, _TABLE | _MORE.get(part, {}), [_told(row) for row in rows])
    missed = [row["what"] for rows in found.values() for row in rows if not row["reached"]]
    return surroundings(plan.dtype) | found | {"missed": missed}


def kernels(plan: Plan) -> Iterator[Result]:
    """Of one step of eight rows over 36 layers."""
    from mlx_provider.testing import kernel_count as count

    with tempfile.TemporaryDirectory() as folder, count.fused() as patch:
        model = count.deep_model(Path(folder) / "model")
        one = count.filled(model, count.ALIKE)
        together = count.kernels(model, one)
        yield _row("8 rows in one group: kernels a step", together, at_most=20 * count.LAYERS + 10)
        four = count.filled(model, count.PAIRS)
        count.rows_apart(patch)
        eight = count.filled(model, count.ALIKE)
        for name, layout, most in (
            ("four groups", four, count.FOUR_GROUPS),
            ("eight groups", eight, count.EIGHT_GROUPS),
        ):
            launched = count.kernels(model, layout)
            yield _row(f"8 rows in {name}: of one group", launched / together, at_most=most)
            yield _row(f"8 rows in {name}: passes a step", len(layout.passes()), at_most=1)


def scheduler(plan: Plan) -> Iterator[Result]:
    """A prompt of 16,000 tokens beside streams, by device and model."""
    from mlx_provider.testing.device_curves import CHIPS, MODELS, Estimate

    for chip, speeds in CHIPS.items():
        for model, needs in MODELS.items():
            yield from _beside_streams(f"{chip}, {model}", Estimate(speeds, needs))
    for name, family in HERE.items():
        yield from _beside_streams(f"this device, {name}", timed(plan, family))


def _beside_streams(name: str, device: Any) -> Iterator[Result]:
    from mlx_provider.testing.device_curves import HOST, pace_alone, reachable, simulate

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
    from mlx_provider.engine.execution.calibration import DEPTH, calibrate, deep_cache
    from mlx_provider.engine.execution.probe import probe
    from mlx_provider.engine.scheduling.costs import Curve
    from mlx_provider.engine.scheduling.plan import GRID
    from mlx_provider.testing.device_curves import Timed

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder) / family, family, plan.dtype, plan.hidden, plan.layers)
        model = load(path, plan.dtype)
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


def allocator(plan: Plan) -> Iterator[Result]:
    """A cold prompt of 32,000 tokens on an 8B model: 4.7 GB of KV."""
    from mlx_provider.testing.allocator_replay import TOKEN_ROW_BYTES, WEIGHTS, cold_prefill

    kv = PROMPT * TOKEN_ROW_BYTES
    for chunk in CHUNKS:
        found, case = cold_prefill(PROMPT, RESERVE, chunk), f"chunks of {chunk}"
        yield _row(f"{case}: GB copied", found.copied / 1e9, at_most=0)
        yield _row(f"{case}: fresh pages over KV", found.pool.fresh / kv, at_most=1.05)
        yield _row(
            f"{case}: peak over weights and KV", found.pool.peak / (WEIGHTS + kv), at_most=PEAK
        )


def noise(plan: Plan) -> Iterator[Result]:
    """Six models of 36 layers: the best layout under noise, and each error in each of them."""
    from mlx_provider.testing import kernel_noise as probing
    from mlx_provider.testing.layout_bugs import CHUNK_BUGS, LAYOUT_BUGS, OTHER_BUGS

    with tempfile.TemporaryDirectory() as folder, probing.noisy_device(Path(folder)) as device:
        models = [device.model(seed) for seed in SEEDS]
        for share in NOISES:
            kept = sum(probing.keeps_the_best(device.probe(model, share)) for model in models)
            what = f"noise {share:g}: models in the best layout"
            yield _row(what, kept, at_least=len(models))
        for kind, bugs, finds in (
            ("a layout", LAYOUT_BUGS, probing.finds_layout_bug),
            ("mixed chunks", CHUNK_BUGS, probing.finds_chunk_bug),
        ):
            cases = [(name, bug, model) for name, bug in bugs.items() for model in models]
            yield _caught(f"{len(bugs)} errors of {kind} in each model", cases, device, finds)
        cases = [
            (name, bug, device.model(0, family, layers=8))
            for name, (family, bug) in OTHER_BUGS.items()
        ]
        what = "errors of windows and states"
        yield _caught(what, cases, device, probing.finds_layout_bug)


def _caught(
    what: str, cases: Sequence[tuple[str, Any, Any]], device: Any, finds: Callable[..., bool]
) -> Result:
    """How many of (name, error, model) the probe finds."""
    from mlx_provider.testing.replaced import Replaced

    missed = []
    for name, bug, model in cases:
        with Replaced() as patch:
            bug(patch)
            if not finds(device.probe, model):
                missed.append(name)
    caught = len(cases) - len(missed)
    return _row(f"{what}: caught", caught, at_least=len(cases), undetected=missed)


PARTS: dict[str, Callable[[Plan], Iterator[Result]]] = {
    "kernels": kernels,
    "scheduler": scheduler,
    "allocator": allocator,
    "noise": noise,
}


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


def _told(row: Result) -> Result:
    """The row as the table has it."""
    sign, wanted = ("≥", row["at_least"]) if "at_least" in row else ("≤", row["at_most"])
    return row | {"target": f"{sign} {wanted:g}", "ok": "ok" if row["reached"] else "MISSED"}


_TABLE = {"what": "what", "target": "target", "found": "found", "ok": "ok"}
_MORE = {
    "scheduler": {"by the device alone": "reachable", "idle tokens/s": "idle_rate"},
    "noise": {"not found": "undetected"},
}
