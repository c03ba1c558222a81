"""What rows with one prefix hold and take for a step, if each has its own and if they share it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider import LoadOptions
from mlx_provider.engine.execution.batch_layout import GroupedLayout
from mlx_provider.engine.execution.decode_batch import run_pass
from mlx_provider.engine.execution.probe import stand_in
from mlx_provider.engine.memory import arrays, leaves
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.tiny import build
from mlx_provider.upstream.shared_kv import divide, prefix_of

TAIL = 128
"""Own tokens of each row."""
STEPS = 5
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Rows that decode."""

    rows: int
    prefix: int
    shared: bool
    seconds: float
    """Fastest step."""
    nbytes: int
    """Bytes of their caches; a shared prefix counts once."""


def run(rows: int = 8, prefixes: Iterable[int] = (4096, 16384)) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        model = load_text(build(Path(folder) / "qwen3", "qwen3", **SIZES), LoadOptions())
    return [
        _measured(model, rows, prefix, shared=shared)
        for prefix in prefixes
        for shared in (False, True)
    ]


def _measured(model: TextModel, rows: int, prefix: int, *, shared: bool) -> Measured:
    layout, held = GroupedLayout(), prefix + TAIL
    filled = _filled(model, held)
    for layer in filled if shared else ():
        divide(layer, prefix)
    for _ in range(rows):
        layout.add(stand_in([1] * held, 0), _copied(filled, shared=shared))
    del filled
    best = min(_step(model, layout, held + i) for i in range(STEPS))
    caches = [layer for group in layout.rows.groups for layer in leaves(group.cache)]
    once = {each for layer in caches if (each := prefix_of(layer)) is not None}
    nbytes = sum(a.nbytes for a in arrays(caches))
    nbytes += sum(each.keys.nbytes + each.values.nbytes for each in once)
    return Measured(rows, prefix, shared, best, nbytes)


def _filled(model: TextModel, tokens: int) -> list[Any]:
    """A row of random keys and values."""
    cache = model.make_cache()
    shape = (1, SIZES["num_key_value_heads"], tokens, SIZES["head_dim"])
    for layer in cache:
        layer.keys, layer.values = mx.random.normal(shape), mx.random.normal(shape)
        layer.offset = tokens
    mx.eval(arrays(cache))
    return cache


def _copied(cache: list[Any], *, shared: bool) -> list[Any]:
    found = deepcopy(cache)
    for layer in () if shared else found:
        layer.keys, layer.values = layer.keys + 0, layer.values + 0
    mx.eval(arrays(found))
    return found


def _step(model: TextModel, layout: GroupedLayout, position: int) -> float:
    began = time.perf_counter()
    for each in layout.passes():
        count = len(each.rows)
        tokens = mx.ones((count,), dtype=mx.int32)
        mx.eval(run_pass(model, each, tokens, [position] * count).logits)
    return time.perf_counter() - began
