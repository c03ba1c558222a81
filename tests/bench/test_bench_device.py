"""What `bench device` reports, and that it tells what was missed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_provider.engine.scheduling.costs import Curve
from mlx_provider.engine.scheduling.plan import GRID
from mlx_provider.testing import device_curves, kernel_noise, layout_bugs
from mlx_provider.testing.device_curves import Timed
from mlx_provider_bench import device
from mlx_provider_bench.device import Plan


def test_counted_and_replayed(bench_here: Callable[..., dict[str, Any]]) -> None:
    result = bench_here("device", "--part", "kernels", "--part", "allocator")
    assert result["missed"] == []
    launched, *others = result["kernels"]
    assert (launched["at_most"], launched["reached"]) == (730, True)
    assert [row["found"] for row in others[1::2]] == [1, 1]
    assert [row["found"] for row in result["allocator"][::3]] == [0, 0]
    assert all(row["found"] > 1 for row in result["allocator"][2::3])


def test_every_device_and_model_is_held_to_the_same_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Curve(((1, 0.5), (64, 0.6)))
    timed = Timed(slow, slow, mixes=True, grid=1)
    monkeypatch.setattr(device, "timed", lambda plan, family: timed)
    monkeypatch.setattr(device_curves, "PROMPT", 2000)
    result = device.bench(Plan(["scheduler"]))
    rows = result["scheduler"]
    names = [row["what"].partition(":")[0] for row in rows[::5]]
    assert names == [
        f"{chip}, {model}"
        for chip in ("M3 Max", "M5 Max", "H200")
        for model in ("dense 8B", "30B-A3B", "hybrid 9B")
    ] + ["this device, dense", "this device, hybrid"]
    assert len(rows) == 5 * len(names)
    assert "this device, dense: longest gap, s" in result["missed"]
    assert "M3 Max, dense 8B: beside 4" not in result["missed"]


def test_this_device_is_timed_as_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "WIDTHS", (1, 8, 64))
    monkeypatch.setattr(device, "REPEATS", 1)
    small = Plan([], hidden=64, layers=3)
    dense, hybrid = (device.timed(small, family) for family in device.HERE.values())
    assert (dense.mixes, dense.grid, hybrid.grid) == (True, 1, GRID)
    assert [n for n, _ in dense.passes.widths] == [1, 8, 64]
    assert 0 < dense.seconds(1, 100) <= dense.seconds(1, 100, 512, 4000)


def test_an_error_that_nobody_finds_is_told() -> None:
    noticed: list[str] = []
    cases = [(name, lambda patch: None, name) for name in ("seen", "unseen")]
    found = device._caught(
        "errors",
        cases,
        SimpleNamespace(probe=noticed.append),
        lambda probe, model: model == "seen",
    )
    assert (found["found"], found["reached"], found["undetected"]) == (1, False, ["unseen"])


def test_noise_and_errors_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    built = kernel_noise.NoisyDevice.model
    shallow = lambda own, seed, family="qwen3", layers=4: built(own, seed, family, 4)  # noqa: E731
    monkeypatch.setattr(kernel_noise.NoisyDevice, "model", shallow)
    monkeypatch.setattr(device, "SEEDS", range(1))
    for name in ("LAYOUT_BUGS", "CHUNK_BUGS", "OTHER_BUGS"):
        known = getattr(layout_bugs, name)
        monkeypatch.setattr(layout_bugs, name, dict(list(known.items())[:1]))
    found = list(device.noise(Plan([])))
    assert [(row["found"], row["reached"]) for row in found] == [(1, True)] * 5
