"""Two and four ranks, every architecture that splits, in float32 and in formats that round."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import answers
from .conftest import Launch
from .models import MODELS, job

pytestmark = pytest.mark.ranks
DENSE = ("llama", "qwen3_vl", "qwen3_5", "gemma3")
QUANTISED = (*DENSE, "qwen3_moe", "gpt_oss", "qwen3_5_moe")
"""Experts in 16 bits have no kernel on a CPU (mlx 0.32.4, `GatherMM`)."""
CASES = [
    *((name, "float32") for name in MODELS),
    *((name, "bfloat16") for name in DENSE),
    *((name, "4 bit") for name in QUANTISED),
]
FOUR = [(name, "float32") for name in MODELS]
"""What four ranks do: formats are a matter of two as well, and two cores carry no more."""
FEW = 6
"""Tokens that four ranks decode."""
CLOSE = 1e-4
ROUNDING = 0.05
"""Of the largest logit: sums of parts are rounded otherwise than the sum of all."""

Case = tuple[str, str]
Answers = Callable[[int], dict[Case, list[Mapping[str, Any]]]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("matrix")
    return {
        case: job(folder / str(index), *case, count=30 if case[1] == "float32" else 4)
        for index, case in enumerate(CASES)
    }


@pytest.fixture(scope="module")
def whole(jobs: dict[Case, dict[str, Any]]) -> Callable[[Case], dict[str, Any]]:
    return cache(lambda case: answers.answer(jobs[case]))


@pytest.fixture(scope="module")
def split(launch: Launch, jobs: dict[Case, Any], tmp_path_factory: Any) -> Answers:
    """What each rank has answered, by case, of so many ranks: they are started once."""

    @cache
    def run(ranks: int) -> dict[Case, list[Mapping[str, Any]]]:
        chosen = jobs if ranks == 2 else {case: jobs[case] | {"count": FEW} for case in FOUR}
        path = tmp_path_factory.mktemp("jobs") / "jobs"
        path.write_text(json.dumps(list(chosen.values())))
        told = launch(Path(answers.__file__), ranks, str(path))
        return {case: [each[i] for each in told] for i, case in enumerate(chosen)}

    return run


@pytest.mark.parametrize(
    ("ranks", "case"),
    [*((2, case) for case in CASES), *((4, case) for case in FOUR)],
    ids=lambda each: "-".join(each) if isinstance(each, tuple) else None,
)
def test_ranks_answer_as_one_process_does(
    ranks: int,
    case: Case,
    split: Answers,
    whole: Callable[[Case], dict[str, Any]],
) -> None:
    alone, told = whole(case), split(ranks)[case]
    for found in told:
        assert "refused" not in found, found
        assert found["info"] == alone["info"]
        apart = np.abs(np.subtract(found["logits"], alone["logits"])).max()
        print(f"{ranks} ranks, {case}: {apart:.2g} of {np.abs(alone['logits']).max():.2g} apart")
        if case[1] != "bfloat16":
            assert apart < CLOSE
            assert found["tokens"] == alone["tokens"][: FEW if ranks == 4 else None]
        else:
            assert apart < ROUNDING * np.abs(alone["logits"]).max()
    assert all(found["logits"] == told[0]["logits"] for found in told)
    assert all(found["tokens"] == told[0]["tokens"] for found in told)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_never_has_the_whole_model(ranks: int, launch: Launch, tmp_path: Path) -> None:
    """Layers of 25 MB, of which at most one matrix is there whole while it is cut."""
    options = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
    one = job(tmp_path / "model", "llama", count=1, **options)
    (tmp_path / "jobs").write_text(json.dumps([one]))
    alone = answers.answer(one)
    told = [each[0] for each in launch(Path(answers.__file__), ranks, str(tmp_path / "jobs"))]
    matrix = 4 * 512 * 4096
    for found in told:
        print(f"{ranks} ranks: {found['bytes']=} {found['peak']=} of {alone['bytes']=}")
        assert found["bytes"] < 1.15 * alone["bytes"] / ranks
        assert found["peak"] < found["bytes"] + 4 * matrix
