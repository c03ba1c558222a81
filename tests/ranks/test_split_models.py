"""Two ranks compute together what one process does, each with its share of the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import answers
from .conftest import Launch
from .models import job

PROGRAM = Path(answers.__file__)
CLOSE = 1e-4


def same_answer(found: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
    assert np.abs(np.subtract(found["logits"], whole["logits"])).max() < CLOSE
    assert found["tokens"] == whole["tokens"]
    assert found["info"] == whole["info"]


@pytest.mark.ranks
def test_two_ranks_answer_as_one_process_does(launch: Launch, tmp_path: Path) -> None:
    jobs = [job(tmp_path / name, name, count=5) for name in ("llama", "qwen3_vl")]
    (tmp_path / "jobs").write_text(json.dumps(jobs))
    ranks: Sequence[Sequence[Any]] = launch(PROGRAM, 2, str(tmp_path / "jobs"))
    for index, one in enumerate(jobs):
        whole = answers.answer(one)
        for told in ranks:
            found = told[index]
            same_answer(found, whole)
            assert [2 * size for size in found["kv"]] == whole["kv"]
            assert found["bytes"] < 0.8 * whole["bytes"]
    leader, follower = (told[1]["bytes"] for told in ranks)
    assert follower < leader  # which alone has the vision tower
