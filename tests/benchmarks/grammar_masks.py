"""What constrained rows add to a decode step.

Sixteen rows of a random model with a vocabulary of real size decode together, of which none, one
or eight follow a grammar; masks are computed by a pool of threads beside the device's step, as in
the engine process, and for comparison without a pool. The constrained replies are checked by a
second matcher, and those of the free rows are compared with a run without constraints.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.commands import load_model
from mlx_provider.engine.execution.probe import probe
from mlx_provider.engine.request import Request, RowConstraint
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import LoadedModel
from mlx_provider.serving.model_cache import MASK_THREADS
from mlx_provider.testing.driver import new_engine, new_request, output_of
from mlx_provider_bench.report import Result, against, print_rows, size_of, surroundings
from random_weights import overrides
from vocabulary import widen

TARGET = 0.10
VOCABULARY = 152_000
FORMS: tuple[Mapping[str, Any], ...] = (
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "note",
                "schema": {
                    "type": "object",
                    "properties": {
                        "title": {"type": "string", "minLength": 2000},
                        "score": {"type": "number"},
                    },
                    "required": ["title", "score"],
                },
            },
        }
    },
    {"grammar": {"type": "regex", "value": "([a-z]{2,9} ){2000}"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "table",
                "schema": {
                    "type": "array",
                    "items": {"enum": ["red", "green", "blue", 1, 2, 3]},
                    "minItems": 2000,
                },
            },
        }
    },
)
"""Free text in a JSON string, a regular expression, a closed choice; none ends by itself."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and how large."""

    rows: int = 16
    constrained: Sequence[int] = (0, 1, 8)
    vocabulary: int = VOCABULARY
    steps: int = 40
    repeats: int = 3
    hidden: int = 512
    layers: int = 6
    dtype: str = "float32"


@dataclass
class Run:
    """Rows decoded together. `seconds`: of each step with every row running."""

    requests: list[Request] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        return [output_of(request).tokens for request in self.requests]


@dataclass(frozen=True)
class Setting:
    """A loaded model and its two compilers."""

    model: LoadedModel
    layout: str
    plan: Plan
    pooled: GrammarCompiler
    serial: GrammarCompiler


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. A table goes to stderr."""
    from tiny import build

    result: Result = surroundings(plan.dtype) | {
        "vocabulary": plan.vocabulary,
        "hidden": plan.hidden,
        "layers": plan.layers,
        "mask_threads": MASK_THREADS,
    }
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(MASK_THREADS) as pool:
        sizes = overrides("qwen3", plan.hidden, plan.layers) | {"vocab_size": plan.vocabulary}
        folder = build(Path(scratch) / "model", "qwen3", dtype=plan.dtype, **sizes)
        widen(folder, plan.vocabulary)
        model = load_model(folder, plan.dtype)
        layout = probe(model, model.make_cache, model.kv_layouts).layout
        result |= size_of(model)
        setting = Setting(model, layout, plan, _compiler(model, pool), _compiler(model, None))
        result["rows"] = _measure(setting)
    print_rows(f"decode step of {plan.rows} rows", _TABLE, result["rows"])
    return result


def _compiler(model: LoadedModel, pool: Executor | None) -> GrammarCompiler:
    info = model.info
    return GrammarCompiler(model.tokenizer.fast, info.stop_tokens, info.vocab_size, pool=pool)


def _measure(setting: Setting) -> list[Result]:
    """Each number of constrained rows in turn, and that `repeats` times; the fastest medians."""
    plan = setting.plan
    sides = [(count, name) for count in plan.constrained for name in ("pooled", "serial")]
    sides = [side for side in sides if side[0] or side[1] == "pooled"]
    best: dict[tuple[int, str], float] = {}
    last: dict[tuple[int, str], Run] = {}
    for _ in range(plan.repeats):
        for side in sides:
            run = _run(setting, side[0], getattr(setting, side[1]))
            best[side] = min(best.get(side, 1e9), statistics.median(run.seconds))
            last[side] = run
    base = (plan.constrained[0], "pooled")
    return [_row(setting, side, best, last, base) for side in sides]


def _row(
    setting: Setting,
    side: tuple[int, str],
    best: Mapping[tuple[int, str], float],
    runs: Mapping[tuple[int, str], Run],
    base: tuple[int, str],
) -> Result:
    count, name = side
    added = best[side] / best[base] - 1
    free = _alike(runs[side].tokens, runs[base].tokens)[count:]
    held = [
        _follows(constraint, tokens)
        for constraint, tokens in zip(
            _constraints(setting.serial, count), runs[side].tokens, strict=False
        )
    ]
    return {
        "constrained": count,
        "masks": name,
        "step_seconds": best[side],
        "added": against(added, TARGET, at_least=False) if name == "pooled" else round(added, 3),
        "valid": f"{sum(held)}/{count}",
        "free_rows_unchanged": f"{sum(free)}/{len(free)}",
        "as_pooled": all(_alike(runs[side].tokens, runs[(count, "pooled")].tokens)),
    }


def _alike(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[bool]:
    """By row: the same tokens as far as both go, since rows may wait for others at the start."""
    pairs = zip(some, others, strict=True)
    return [all(map(int.__eq__, a, b)) for a, b in pairs]


def _run(setting: Setting, count: int, compiler: GrammarCompiler) -> Run:
    """Decode every row for `steps` steps, the first `count` of them constrained."""
    plan = setting.plan
    engine = new_engine(setting.model, layout=setting.layout, max_chunk=2048)
    prompts = [[5 + i, 300 + 7 * i, 40 + i, 260 + 3 * i] for i in range(plan.rows)]
    run = Run([new_request(prompt, max_tokens=plan.rows + plan.steps + 8) for prompt in prompts])
    for request, constraint in zip(run.requests, _constraints(compiler, count), strict=False):
        request.rows[0].constraint = constraint
    for request in run.requests:
        engine.submit(request)
    while len(engine.scheduler.running) < plan.rows:
        engine.step()
    for _ in range(plan.steps):
        began = time.perf_counter()
        engine.step()
        run.seconds.append(time.perf_counter() - began)
    for request in run.requests:
        engine.cancel(request)
    engine.step()
    return run


def _constraints(compiler: GrammarCompiler, count: int) -> list[RowConstraint]:
    """Fresh constraints, the forms in turn."""
    made: list[RowConstraint] = []
    for i in range(count):
        wanted = GenerateRequest(model="random", prompt="", **FORMS[i % len(FORMS)])
        structure = compiler.structure(wanted)
        if structure is None:
            raise AssertionError("a form that demands nothing")
        made.append(structure.constraint)
    return made


def _follows(constraint: RowConstraint, tokens: Sequence[int]) -> bool:
    """Whether every token was allowed where it stands, and there were any."""
    for token in tokens:
        mask = constraint.mask()
        if mask is None or not mask[token // 32] >> (token % 32) & 1:
            return False
        constraint.advance(token)
    return bool(tokens)


_TABLE = {
    "constrained": "constrained",
    "masks": "masks",
    "step s": "step_seconds",
    "added": "added",
    "valid": "valid",
    "free rows unchanged": "free_rows_unchanged",
    "as pooled": "as_pooled",
}
