"""What the benchmark `scheduling` reports, and that it tells what was missed."""

from __future__ import annotations

import pytest

import device_curves
import scheduling
from device_curves import Timed
from mlx_provider.engine.scheduling.costs import Curve
from mlx_provider.engine.scheduling.plan import GRID
from scheduling import Plan


def test_every_device_and_model_is_held_to_the_same_targets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = Curve(((1, 0.5), (64, 0.6)))
    deep = Curve(slow.widths, ((1, 0.0), (64, 2e-3)))  # which the engine does not know
    timed = Timed(deep, slow, mixes=True, grid=1)
    monkeypatch.setattr(scheduling, "timed", lambda plan, family: timed)
    monkeypatch.setattr(device_curves, "PROMPT", 2000)
    monkeypatch.setattr(scheduling, "LONG", 2000)
    result = scheduling.bench(Plan())
    rows = result["rows"]
    names = [row["what"].partition(":")[0] for row in rows[::18]]
    assert names == [
        f"{chip}, {model}"
        for chip in ("M3 Max", "M5 Max", "H200")
        for model in ("dense 8B", "30B-A3B", "hybrid 9B")
    ] + ["this device, dense", "this device, hybrid"]
    assert len(rows) == 18 * len(names)
    tight = "2,000 beside 1 of 8,000 at 0.04 s: "
    assert f"this device, dense: {tight}longest gap" in result["missed"]
    assert f"M3 Max, dense 8B: {tight}longest gap" not in result["missed"]


def test_this_device_is_timed_as_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "WIDTHS", (1, 8, 64))
    monkeypatch.setattr(scheduling, "REPEATS", 1)
    small = Plan(hidden=64, layers=3)
    dense, hybrid = (scheduling.timed(small, family) for family in scheduling.HERE.values())
    assert (dense.mixes, dense.grid, hybrid.grid) == (True, 1, GRID)
    assert [n for n, _ in dense.passes.widths] == [1, 8, 64]
    assert 0 < dense.seconds(1, 100) <= dense.seconds(1, 100, 512, 4000)
