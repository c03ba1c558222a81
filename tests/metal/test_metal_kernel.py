"""The text of the kernel, translated to NumPy with 32 lanes, against plain operations.

Nothing here runs on Metal. It proves the arithmetic and the indices of the text, not that a
compiler takes it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_provider.serving.kernels import install
from mlx_provider.upstream import shared_attention
from mlx_provider_metal import kernel, matches, prefix, trial
from mlx_provider_metal.kernel import QUERIES

LANES = np.arange(kernel.LANES)
TYPES = "(?:uint|int|long|float)"
RULES = [
    (r"for \(int (\w+) = (.+); \w+ < (.+); \w+\+\+\) \{", r"for \1 in range(\2, \3):"),
    (r"for \(int (\w+) = (.+); \w+ < (.+); \w+ \+= (.+)\) \{", r"for \1 in range(\2, \3, \4):"),
    (r"if \(lane == 0\) \{", "if True:"),
    (r"threadgroup float (\w+)\[(.+)\];", r"\1 = Memory(np.full(\2, np.nan, np.float32))"),
    (rf"{TYPES} (\w+)\[(.+)\];", r"\1 = np.full((\2, 32), np.nan, np.float32)"),
    (rf"{TYPES} (\w+ = .+);", r"\1"),
    (r"(.+);", r"\1"),
]  # fmt: skip
"""Statements of the kernel as statements of Python, the first that fits."""


def translated(source: str) -> str:
    """Raises `AssertionError` for a statement of another form."""
    lines, depth = [], 0
    for line in filter(None, map(str.strip, source.splitlines())):
        if line == "}":
            depth -= 1
            continue
        form, python = next((f, p) for f, p in RULES if re.fullmatch(f, line))
        written = re.sub(r"(\d)f\b", r"\1", re.sub(form, python, line))
        lines.append("    " * depth + re.sub(r"\bfloat\(", "single(", written))
        depth += line.endswith("{")
    assert not depth
    return "\n".join(lines)


class Memory:
    """An array of the device, flat: counts reads and writes of each element."""

    def __init__(self, array: Any) -> None:
        self.flat = array.reshape(-1)
        self.reads, self.writes = (np.zeros(self.flat.size, int) for _ in range(2))

    def _at(self, index: Any) -> Any:
        index = np.asarray(index)
        assert np.all((index >= 0) & (index < self.flat.size)), "outside of the array"
        return index

    def __getitem__(self, index: Any) -> Any:
        at = self._at(index)
        np.add.at(self.reads, np.unique(at), 1)  # lanes that read the same read it once
        found = self.flat[at]
        return int(found) if found.ndim == 0 and found.dtype.kind == "i" else found

    def __setitem__(self, index: Any, value: Any) -> None:
        at = self._at(index)
        np.add.at(self.writes, np.unique(at), 1)
        self.flat[at] = value if at.ndim else np.unique(value).item()


class Emulated:
    """What `mx.fast.metal_kernel` returns."""

    def __init__(self, source: str, *, views: bool = False) -> None:
        """`views`: keys and values are the first part of longer arrays."""
        self._code = compile(translated(source), "kernel", "exec")
        self._views = views
        self.memory: dict[str, Memory] = {}

    def __call__(self, *, inputs: Any, template: Any, grid: Any, **more: Any) -> list[mx.array]:
        assert more["threadgroup"] == (32, 1, 1)
        arrays = [np.array(x if x.dtype == mx.int32 else x.astype(mx.float32)) for x in inputs]
        if self._views:
            arrays[1:3] = [np.concatenate([x, x + np.nan], axis=2) for x in arrays[1:3]]
        given = dict(zip(kernel.INPUTS, arrays, strict=True))
        made = [np.full(shape, np.nan, np.float32) for shape in more["output_shapes"]]
        names = {**FUNCTIONS, **dict(template)}
        for name, array in [*given.items(), *zip(kernel.OUTPUTS, made, strict=True)]:
            self.memory[name] = names[name] = Memory(array)
            names[f"{name}_shape"] = array.shape
            names[f"{name}_strides"] = [n // array.itemsize for n in array.strides]
        for pair, head in itertools.product(range(grid[1]), range(grid[2])):
            where = {
                "thread_position_in_threadgroup": SimpleNamespace(x=LANES),
                "threadgroup_position_in_grid": SimpleNamespace(y=pair, z=head),
            }
            exec(self._code, {**names, **where})
        return [mx.array(array) for array in made]


def over_lanes(reduce: Any) -> Any:
    return lambda x: np.full(32, reduce(x), np.float32)


FUNCTIONS: dict[str, Any] = {
    "np": np, "Memory": Memory, "min": lambda a, b: np.minimum(a, b), "max": np.maximum,
    "exp": np.exp, "log": np.log, "simd_max": over_lanes(np.max), "simd_sum": over_lanes(np.sum),
    "select": lambda no, yes, which: np.where(which, yes, no).astype(np.float32),
    "simd_broadcast": lambda x, lane: x[lane], "single": np.float32,
    "int": np.int64, "long": np.int64, "ushort": np.int64,
    "threadgroup_barrier": lambda flags: None, "mem_flags": SimpleNamespace(), "range": range,
}  # fmt: skip
KEYS = 64
"""Of a block here, for speed."""
SOURCE = kernel.SOURCE.replace("mem_flags::mem_threadgroup", "0")


def plain(*asked: Any) -> tuple[mx.array, mx.array]:
    return shared_attention.attend_prefix(*asked, None)


def kernel_of(source: str) -> trial.Attention:
    return functools.partial(prefix.partial, Emulated(source))


def given(queries: int, keys: int, width: int = 64) -> tuple[mx.array, mx.array, mx.array, float]:
    mx.random.seed(queries)
    arrays = (mx.random.normal((1, 2, n, width)) for n in (queries, keys, keys))
    return (*arrays, 0.2)  # type: ignore[return-value]


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (8, 64), (17, KEYS + 45)])
@pytest.mark.parametrize("width", [32, 64])
def test_the_kernel_gives_what_plain_operations_give(
    queries: int, keys: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "KEYS", KEYS)
    asked = given(queries, keys, width)
    launch = Emulated(SOURCE)
    found = prefix.partial(launch, *asked)
    for ours, theirs in zip(found, plain(*asked), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert mx.abs(ours - theirs).max().item() < 2e-5
    blocks = -(-queries // QUERIES)
    for name in ("keys", "values"):
        assert set(launch.memory[name].reads) == {blocks}, "once for each block of queries"
    for name in kernel.OUTPUTS:
        assert set(launch.memory[name].writes) == {1}


def test_a_view_of_a_longer_prefix_is_read_where_it_is() -> None:
    asked = given(3, 40)
    found = prefix.partial(Emulated(SOURCE, views=True), *asked)
    for ours, theirs in zip(found, plain(*asked), strict=True):
        assert mx.abs(ours - theirs).max().item() < 2e-5


def test_the_core_calls_the_kernel_for_heads_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Emulated(SOURCE)
    monkeypatch.setattr(prefix, "compiled", lambda: launch)
    monkeypatch.setattr(prefix, "better", lambda ours, usual: True)
    original = shared_attention.attend_prefix
    (replacement,) = prefix.REPLACEMENTS
    assert getattr(shared_attention, replacement.name) is original
    assert (original.__module__, original.__name__) == (replacement.module, replacement.name)
    ours = replacement.make(original)
    asked = given(4, 30)
    for mine, theirs in zip(ours(*asked, None), original(*asked, None), strict=True):
        assert mx.abs(mine - theirs).max().item() < 2e-5
    assert launch.memory
    launch.memory.clear()
    ours(*given(4, 30, width=48), None)
    assert not launch.memory
    monkeypatch.setattr(prefix, "better", lambda ours, usual: False)
    assert not install("metal", prefix.REPLACEMENTS, nn.Module())
    assert shared_attention.attend_prefix is original


def test_a_trial_refuses_a_kernel_that_is_wrong_or_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial, "KEYS", 35)
    monkeypatch.setattr(trial, "HEADS", 1)
    monkeypatch.setattr(trial, "WIDTH", 32)
    monkeypatch.setattr(trial, "QUERIES", 2)
    monkeypatch.setattr(trial, "REPEATS", 1)
    caplog.set_level(logging.INFO)
    times = iter([0.0, 1.0] * trial.REPEATS + [0.0, 0.5] * trial.REPEATS)
    monkeypatch.setattr(trial, "perf_counter", times.__next__)
    assert trial.better(kernel_of(SOURCE), plain)
    times = iter([0.0, 0.5] * trial.REPEATS + [0.0, 1.0] * trial.REPEATS)
    monkeypatch.setattr(trial, "perf_counter", times.__next__)
    assert not trial.better(kernel_of(SOURCE), plain)
    assert not trial.better(kernel_of(SOURCE.replace("stop - 1)", "stop - 2)")), plain)
    assert "differs by" in caplog.text


def test_it_is_for_metal_alone() -> None:
    assert matches("metal", "low")
    assert not matches("cpu", "float32")
