"""The memory of running passes is measured and reserved, in addition to that of rows."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import LoadOptions, PrefillChunk, Prompt
from mlx_provider.engine.row_cache import arrays
from mlx_provider.engine.scheduling.chunking import PassBytes, PassMemory
from mlx_provider.engine.scheduling.costs import UNMEASURED, Curve
from mlx_provider.engine.scheduling.ledger import MemoryProfile
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.serving import memory_limit as memory
from mlx_provider.serving.calibration import calibrate, deep_cache
from mlx_provider.serving.engine_builder import cache_maker
from mlx_provider.serving.probe import Probe
from python_process import run_python
from tiny import build

GIGA = 2**30
SOLO = Probe("solo", MemoryProfile(0, 0), ())


def passing(model: TextModel, cache: list[Any], start: int, width: int) -> int:
    """Peak bytes of a running chunk."""
    mx.eval(arrays(cache))
    mx.reset_peak_memory()
    tokens = Prompt([7] * (start + width))
    mx.eval(model.prefill(PrefillChunk(tokens, start, start + width, cache)), arrays(cache))
    return mx.get_peak_memory() - mx.get_active_memory()


PROGRAM = """
import json, sys
from dataclasses import replace

import mlx.core as mx

from mlx_provider import LoadOptions
from mlx_provider.serving.calibration import calibrate
from mlx_provider.serving.probe import probe
from mlx_provider.engine.scheduling.chunking import PassMemory
from mlx_provider.engine.scheduling.costs import Curve
from mlx_provider.families.text import load_text
from mlx_provider.testing.driver import new_engine, new_request, run
from tiny import build
from pathlib import Path

model = load_text(build(Path(sys.argv[1]), sys.argv[2]), LoadOptions())
found = probe(model, model.make_cache, ["solo"])
rows = found.memory
# one that no busy machine changes
curve = Curve(((1, 0.001), (256, 0.01)), ((1, 1e-9), (256, 2e-9)))
measured = calibrate(model, model.make_cache, found).passes
passes = PassMemory.of(measured, curve, seconds=100, max_chunk=256)
engine = new_engine(model, layout="solo", max_chunk=256, row_bytes=rows.row_bytes)
vars(engine.scheduler.ledger).update(pass_bytes=passes)
request = new_request([5 + i % 90 for i in range(1500)], max_tokens=4)
reserved = engine.scheduler.ledger.reservation(request.rows)
mx.clear_cache()
before = mx.get_active_memory()
mx.reset_peak_memory()
run(engine, request)
print(json.dumps([mx.get_peak_memory() - before, reserved, rows.row_bytes(1564)]))
"""
"""A process of its own: functions of MLX are replaced in one for good by whatever test needs it,
and with others than MLX's own, attention here never holds its scores."""


@pytest.mark.parametrize(
    "family", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.sweep), "nemotron_h"]
)
def test_the_peak_of_a_request_is_within_its_reservation(family: str, tmp_path: Path) -> None:
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = run_python(PROGRAM, tmp_path / "m", family, env=os.environ | path)
    peak, reserved, kept = json.loads(done.stdout)
    assert peak <= 1.2 * reserved
    assert reserved <= 2 * peak
    assert kept < 0.8 * peak  # otherwise the test proves nothing


def test_a_deep_chunk_is_as_narrow_as_its_time_demands() -> None:
    curve = Curve(((1, 0.005), (64, 0.32)), ((1, 1e-7), (64, 64e-7)))
    passes = PassMemory.of(PassBytes(row=10, token=100, pair=1), curve, 0.5, 64)
    assert (passes.widest, passes.min_chunk) == (64, 16)
    assert passes(10, 1) == 10 + 1000 + 100
    assert passes(500, 2) == 20 + 6400 + 64 * 500
    # limit: 64 new tokens after 28,125; 16, the fewest, may follow any number
    assert passes(50_000, 1) == pytest.approx(10 + 6400 + 64 * 28_125)
    assert passes(10**6, 1) == pytest.approx(10 + 6400 + 16 * 10**6)
    assert passes(1, 200) == 2000 + 20_000 + 1


def test_the_copy_of_one_quantised_layer_is_reserved_for_each_cached_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device with a fused kernel for many queries, which stores no scores."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda q, k, v, **more: mx.depends(mx.cos(q), [k, v]),
    )
    folder = build(tmp_path / "m", "qwen3", dtype="float32", head_dim=64, num_hidden_layers=6)
    model = load_text(folder, LoadOptions(dtype="float32"))
    make = cache_maker(model, 8)
    deep = deep_cache(model, make, 3000, 64)
    for layer in deep:
        assert layer.offset == 3000
        for each in (*layer.keys, *layer.values):
            assert mx.array_equal(each[:, :, :3000], mx.repeat(each[:, :, :1], 3000, axis=2))
    one_layer = 2 * 2 * 64 * 4
    found = calibrate(model, make, SOLO).passes
    assert one_layer <= found.key <= 2.2 * one_layer  # a CPU dequantises in two steps
    assert (
        found.pair < 8
    )  # scores of four heads would need 16 bytes; the rest is noise of the measured peaks
    reserved = PassMemory.of(found, UNMEASURED, 100, 64)(3064, 1)
    assert passing(model, deep, 3000, 64) <= reserved


def test_a_failed_measurement_reserves_nothing() -> None:
    """Loading continues, with the memory that the limit leaves besides the working set."""

    class Broken:
        info = SimpleNamespace(context_length=4096, vocab_size=100)

    found = calibrate(Broken(), list, SOLO)  # type: ignore[arg-type]
    assert (found.curve, found.passes) == (UNMEASURED, PassBytes())
    passes = PassMemory.of(found.passes, UNMEASURED, 0.5, 2048)
    assert passes(10_000, 3) == 0


def test_memory_is_reserved_for_the_large_chunks_of_a_slow_device() -> None:
    slow = Curve(((1, 0.6), (2000, 2.6)), depths=((1, 1e-6), (64, 64e-6)))
    passes = PassMemory.of(PassBytes(pair=1), slow, 0.5, 2048)
    assert passes.widest >= passes.min_chunk >= 1000
    assert passes(100_000, 1) == passes.min_chunk * 100_000


def test_the_memory_of_metal_cuda_and_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(**told: Any) -> int:
        monkeypatch.setattr(mx, "device_info", lambda: told)
        return memory.memory_limit(None)

    monkeypatch.setattr(mx, "get_active_memory", lambda: 2 * GIGA)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: GIGA)
    for total, free, expected in (
        (80, 79, 68),  # 12 GB stay free: plans and workspaces of first passes on an H100
        (80, 47, 38),  # other processes use 30 GB, and the passes need as much
        (80, 13, 8),  # half of what is free, if little is
        (8, 5, 5),  # 3 GB stay free on a small card
    ):
        assert limit(total_memory=total * GIGA, free_memory=free * GIGA) == expected * GIGA
    for unused, metal, cpu in (
        (60, 34, 44),  # 85 % of the working set; 70 % of the machine
        (34, 34, 31),  # what other programs leave, and an eighth of what they hold; 85 % of it
        (10, 19, 11),
    ):
        found = SimpleNamespace(total=64 * GIGA, available=unused * GIGA)
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda found=found: found)
        own = limit(max_recommended_working_set_size=40 * GIGA, memory_size=64 * GIGA)
        assert (own // GIGA, limit(architecture="x86_64") // GIGA) == (metal, cpu)
    assert memory.memory_limit(5) == 5


def test_the_pool_is_a_small_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.pool_limit(8 * GIGA) == 0  # on a CPU
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert memory.pool_limit(8 * GIGA) == GIGA // 2
    assert memory.pool_limit(100 * GIGA) == 2 * GIGA
