"""The operator's choice of a KV cache, and whether the model supports it.

The engine settings for `reproducible: true`, and their description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from ..engine.execution.pass_memory import Reserve, unlimited
from ..engine.execution.probe import Probe, exact_rows, probe
from ..engine.fixed_shapes import FixedShapes
from ..engine.memory import arrays
from ..engine.scheduling.scheduler import Limits
from ..errors import wrong_option
from ..isolation import Isolation
from ..protocol.health import FixedPasses
from ..protocol.requests import ModelOptions
from ..records import LoadedModel, PrefillChunk, Prompt
from ..upstream import mlx_lm

MakeCache = Callable[[], list[Any]]

TRIAL_TOKENS = 4
GROUPS = (64, 32)
"""Values per scale. The first that divides every head size is used."""


def kv_kind(options: ModelOptions) -> str:
    return f"{options.kv_bits} bits" if options.kv_bits else ""


def engine_kind(options: ModelOptions) -> str:
    """Requests of one kind share an engine and the prefix cache's keys."""
    kinds = (kv_kind(options), "reproducible" if options.reproducible else "")
    return ", ".join(filter(None, kinds))


def cache_maker(model: LoadedModel, bits: int | None) -> MakeCache:
    """Engine thread. Raises `BadRequest` if no group divides the heads."""
    if bits is None:
        return model.make_cache
    sizes = _head_sizes(model)
    for group in GROUPS:
        if not any(size % group for size in sizes):
            return partial(_quantised, model, bits, group)
    raise wrong_option(
        "kv_bits",
        f"the size of this model's heads ({', '.join(map(str, sorted(sizes)))}) is no multiple of "
        f"{GROUPS[-1]}, the smallest group of values with one scale: leave kv_bits out",
    )


def tried(
    model: LoadedModel,
    make_cache: MakeCache,
    bits: int | None,
    layouts: Sequence[str],
    reserve: Reserve = unlimited,
) -> Probe:
    """See `probe` (engine thread). Raises `BadRequest` that names the option with which the model
    does not run."""
    if bits is None:
        return probe(model, make_cache, layouts, reserve)
    with Isolation() as trying:
        return probe(model, make_cache, layouts, reserve)
    reason = trying.fault.summary if trying.fault is not None else ""
    why = f"this model does not run with a quantised KV cache ({reason}): leave kv_bits out"
    raise wrong_option("kv_bits", why)


def _quantised(model: LoadedModel, bits: int, group: int) -> list[Any]:
    return mlx_lm.quantised(model.make_cache(), bits, group)


def _head_sizes(model: LoadedModel) -> set[int]:
    cache = model.make_cache()
    tokens = [token % model.info.vocab_size for token in range(1, TRIAL_TOKENS + 1)]
    model.prefill(PrefillChunk(Prompt(tokens), 0, TRIAL_TOKENS, cache))
    mx.eval(arrays(cache))
    return {array.shape[-1] for layer in mlx_lm.quantisable(cache) for array in arrays([layer])}


@dataclass(frozen=True)
class Reproducible:
    shapes: FixedShapes
    cost: float
    """Time of such a pass, as a multiple of a single-row pass."""
    note: str = ""

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        make_cache: MakeCache,
        found: Probe,
        limits: Limits,
        reserve: Reserve,
    ) -> Reproducible:
        """The passes with the most rows that give equal bits (engine thread). `reserve`: see
        `exact_rows`."""
        shapes = FixedShapes.within(limits.max_rows, limits.max_chunk)
        wanted = shapes.rows if found.layout == "grouped" else 1
        exact = exact_rows(model, make_cache, wanted, reserve)
        return cls(replace(shapes, rows=exact.rows), exact.cost, exact.note)

    def limits(self, limits: Limits) -> Limits:
        return replace(limits, max_chunk=self.shapes.tokens)

    def passing(
        self, passes: Callable[[int, int], int], state_bytes: int
    ) -> Callable[[int, int], int]:
        """Bytes of passes, padded with rows of `state_bytes` each."""
        rows = self.shapes.rows
        beside = (rows - 1) * state_bytes
        return lambda tokens, live: passes(tokens, max(rows, live)) + beside

    @property
    def summary(self) -> FixedPasses:
        return FixedPasses(rows=self.shapes.rows, tokens=self.shapes.tokens, cost=self.cost)
