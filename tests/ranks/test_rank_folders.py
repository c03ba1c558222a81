"""A model that one rank has not, or has otherwise, is refused; the group serves the next one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlx_provider.testing.tiny import build

from .models import MODELS
from .rank_schedules import ask, over, read

pytestmark = pytest.mark.ranks


def test_a_model_that_a_rank_has_not_is_refused(tmp_path: Path) -> None:
    sizes = MODELS["llama"][2]
    model = build(tmp_path / "model", "llama", **sizes)
    other = build(tmp_path / "other", "llama", **(sizes | {"seed": 1}))
    gone = Path(shutil.copytree(model, tmp_path / "gone"))
    unlike = Path(shutil.copytree(model, tmp_path / "unlike"))
    do = [ask(each.name, each, "hello") for each in (gone, unlike, model)]
    elsewhere = {"1": {str(gone): str(tmp_path / "nowhere"), str(unlike): str(other)}}
    told = tmp_path / "told"
    told.mkdir()
    played, _ = over(2, told, [*do, read("model")], elsewhere=elsewhere)
    answers = played["answers"]
    missing, differs = (answers[name]["failed"] for name in ("gone", "unlike"))
    assert missing[0] == differs[0] == "load_failed"
    assert "could not be loaded by rank 1" in missing[1]
    assert "other weights or another config on rank 1" in differs[1]
    assert answers["model"]["finish"] == {"0": "length"}
