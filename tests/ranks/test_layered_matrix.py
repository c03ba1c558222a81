"""Models that split layer by layer alone, over two and three ranks: the same as in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from . import answers
from .conftest import Launch
from .models import LAYERED, job

pytestmark = pytest.mark.ranks
CASES = [*((name, "float32") for name in LAYERED), ("qwen2", "bfloat16"), ("qwen3_moe", "4 bit")]

Case = tuple[str, str]
Answers = Callable[[int], dict[Case, list[Mapping[str, Any]]]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("layered")
    return {
        case: job(folder / str(index), *case, count=20, layered=True)
        for index, case in enumerate(CASES)
    }


@pytest.fixture(scope="module")
def whole(jobs: dict[Case, dict[str, Any]]) -> Callable[[Case], dict[str, Any]]:
    return cache(lambda case: answers.answer(jobs[case]))


@pytest.fixture(scope="module")
def split(launch: Launch, jobs: dict[Case, Any], tmp_path_factory: Any) -> Answers:
    """What each rank has answered, by case, of so many ranks: they are started once."""
    path = tmp_path_factory.mktemp("jobs") / "jobs"
    path.write_text(json.dumps(list(jobs.values())))

    @cache
    def run(ranks: int) -> dict[Case, list[Mapping[str, Any]]]:
        told = launch(Path(answers.__file__), ranks, str(path))
        return {case: [each[i] for each in told] for i, case in enumerate(jobs)}

    return run


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_on_ranks_answer_as_one_process_does(
    ranks: int, case: Case, split: Answers, whole: Callable[[Case], dict[str, Any]]
) -> None:
    """To the bit, in every format: each layer computes what it computes in one process."""
    alone, told = whole(case), split(ranks)[case]
    for found in told:
        assert "refused" not in found, found
        assert found["info"] == alone["info"]
        assert found["logits"] == alone["logits"]
        assert found["tokens"] == alone["tokens"]
        assert found["apart"] == alone["apart"]
    layers = [len(found["kv"]) for found in told]
    assert sum(layers) == len(alone["kv"])
    assert [size for found in reversed(told) for size in found["kv"]] == alone["kv"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_never_has_layers_of_others(ranks: int, launch: Launch, tmp_path: Path) -> None:
    """Layers of 25 MB; the largest share has two of five or three of five."""
    options = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 5}
    one = job(tmp_path / "model", "qwen2", count=1, layered=True, **options)
    (tmp_path / "jobs").write_text(json.dumps([one]))
    alone = answers.answer(one)
    told = [each[0] for each in launch(Path(answers.__file__), ranks, str(tmp_path / "jobs"))]
    layer, matrix = alone["bytes"] / 5, 4 * 512 * 4096
    for found in told:
        print(f"{ranks} ranks: {found['bytes']=} {found['peak']=} of {alone['bytes']=}")
        assert found["bytes"] < 1.15 * layer * len(found["kv"])
        assert found["peak"] < found["bytes"] + 2 * matrix
