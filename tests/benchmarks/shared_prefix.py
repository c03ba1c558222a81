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
from mlx.utils import tree_flatten, tree_map

from allocator_replay import TOKEN_ROW_BYTES
from mlx_provider import LoadOptions
from mlx_provider.engine.execution.batch_layout import Layout
from mlx_provider.engine.execution.decode_batch import run_pass
from mlx_provider.engine.execution.probe import stand_in
from mlx_provider.engine.memory import arrays, leaves
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.upstream.mlx_lm import quantised
from mlx_provider.upstream.shared_kv import divide, prefix_of, start
from tiny import build

GROUP = 32
"""Values that share a scale, if keys and values are quantised."""
TAIL = 128
"""Own tokens of each row."""
STEPS = 12
"""Of each way, in turn, so that other work on the machine slows both."""
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 256,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip


UNLIKE = range(128, 1025, 128)
"""Own tokens of eight rows."""
PADDED_AT = 512
"""Prefix of the rows whose padding is counted: it does not depend on that."""


@dataclass(frozen=True)
class Step:
    seconds: float
    cpu: float


@dataclass(frozen=True)
class Measured:
    """Rows that decode."""

    bits: int | None
    """Of keys and values."""
    rows: int
    prefix: int
    shared: bool
    seconds: float
    """Fastest step."""
    cpu: float
    """Least processor time of a step, seconds: it says more if others use the machine."""
    nbytes: int
    """Bytes of their caches; a shared prefix counts once."""


def run(
    rows: int = 8, prefixes: Iterable[int] = (4096, 16384), bits: int | None = None
) -> list[Measured]:
    with tempfile.TemporaryDirectory() as folder:
        model = load_text(build(Path(folder) / "qwen3", "qwen3", **SIZES), LoadOptions())
    return [each for prefix in prefixes for each in _measured(model, rows, prefix, bits)]


def read_bytes(prefix: int = 20_000, tails: Iterable[int] = UNLIKE) -> int:
    """Bytes of keys and values that a step of a model of 8B in 16 bits reads, with the padding of
    rows in one group."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_text(build(Path(folder) / "qwen3", "qwen3", **SIZES), LoadOptions())
    layout = Layout("grouped")
    filled = _filled(model, PADDED_AT + 1, None)
    held = [divide(layer, PADDED_AT) for layer in filled]
    for tail in tails:
        cache = model.make_cache()
        for layer, each in zip(cache, held, strict=True):
            start(layer, each)
            shape = (1, SIZES["num_key_value_heads"], tail, SIZES["head_dim"])
            layer.update_and_fetch(mx.zeros(shape), mx.zeros(shape))
        layout.add(stand_in([1] * (PADDED_AT + tail), 0), cache)
    groups = layout.groups
    padded = sum(len(each.rows) * max(row.held for row in each.rows) for each in groups)
    own = padded - PADDED_AT * sum(len(each.rows) for each in groups)
    return (prefix + own) * TOKEN_ROW_BYTES


def made_cache(model: TextModel, bits: int | None) -> list[Any]:
    """A fresh row cache."""
    return model.make_cache() if bits is None else quantised(model.make_cache(), bits, GROUP)


def _measured(model: TextModel, rows: int, prefix: int, bits: int | None) -> list[Measured]:
    layouts = {
        shared: _layout(model, rows, prefix, bits, shared=shared) for shared in (False, True)
    }
    steps: dict[bool, list[Step]] = {shared: [] for shared in layouts}
    for at in range(STEPS):
        for shared, layout in layouts.items():
            steps[shared].append(_step(model, layout, prefix + TAIL + at))
    return [
        Measured(
            bits,
            rows,
            prefix,
            shared,
            min(each.seconds for each in steps[shared]),
            min(each.cpu for each in steps[shared]),
            _nbytes(layout),
        )
        for shared, layout in layouts.items()
    ]


def _layout(model: TextModel, rows: int, prefix: int, bits: int | None, *, shared: bool) -> Layout:
    layout, held = Layout("grouped"), prefix + TAIL
    filled = _filled(model, held, bits)
    for layer in filled if shared else ():
        divide(layer, prefix)
    for _ in range(rows):
        layout.add(stand_in([1] * held, 0), _copied(filled, shared=shared))
    return layout


def _nbytes(layout: Layout) -> int:
    caches = [layer for group in layout.groups for layer in leaves(group.cache)]
    once = {each for layer in caches if (each := prefix_of(layer)) is not None}
    nbytes = sum(a.nbytes for a in arrays(caches))
    return nbytes + sum(a.nbytes for _, a in tree_flatten([[p.keys, p.values] for p in once]))


def _filled(model: TextModel, tokens: int, bits: int | None) -> list[Any]:
    """A row of random keys and values."""
    cache = made_cache(model, bits)
    shape = (1, SIZES["num_key_value_heads"], tokens, SIZES["head_dim"])
    for layer in cache:
        layer.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
    mx.eval(arrays(cache))
    return cache


def _copied(cache: list[Any], *, shared: bool) -> list[Any]:
    found = deepcopy(cache)
    for layer in () if shared else found:
        layer.keys, layer.values = tree_map(lambda a: a + 0, (layer.keys, layer.values))
    mx.eval(arrays(found))
    return found


def _step(model: TextModel, layout: Layout, position: int) -> Step:
    began, used = time.perf_counter(), time.process_time()
    for each in layout.passes():
        count = len(each.rows)
        tokens = mx.ones((count,), dtype=mx.int32)
        mx.eval(run_pass(model, each, tokens, [position] * count).logits)
    return Step(time.perf_counter() - began, time.process_time() - used)
