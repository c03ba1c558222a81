"""Models that suit a machine, by its memory and chip."""

from collections.abc import Sequence
from datetime import date
from types import SimpleNamespace

import pytest

from mlx_provider.client import connection
from mlx_provider.gateway import models as recommended
from mlx_provider.gateway.models import (
    MEMORY_SHARE,
    Machine,
    recommend_two,
    recommended_models,
    this_machine,
)
from mlx_provider.protocol.health import MemoryStats
from mlx_provider.serving.memory_limit import RESERVE

GB = 10**9
WORKING_SET = 0.75
"""Of a Mac's memory: what Metal recommends unless told otherwise. 0.84 was measured on 128 GB
(antirez/ds4, pull request 893), 0.74 on 16 GB (AlexsJones/llmfit, pull request 754)."""
WEIGHTS_SHARE = 0.9 * MEMORY_SHARE * (1 - RESERVE) * WORKING_SET
"""Of a Mac's memory: what weights may take, so that a context of some size fits, too."""


def named(machine: Machine) -> list[str]:
    """Their sizes, as their names have them."""
    parts = [
        each.name.partition("/")[2].split("-")
        for each in recommend_two(machine, recommended_models()[1])
    ]
    return [next(part for part in name if part[-1] == "B") for name in parts]


@pytest.mark.parametrize(
    ("memory", "sizes"),
    [
        (4, ["1.7B"]),
        (8, ["4B", "1.7B"]),
        (24, ["9B", "4B"]),
        (36, ["30B", "4B"]),
        (128, ["35B", "4B"]),
    ],
)
def test_the_recommended_models_depend_on_memory(memory: int, sizes: list[str]) -> None:
    assert named(Machine("Apple M4", memory * GB)) == sizes


def test_a_cpu_gets_models_that_read_few_bytes_a_token() -> None:
    assert named(Machine("Xeon", 24 * GB, gpu=False)) == ["4B", "1.7B"]
    assert named(Machine("Xeon", 64 * GB, gpu=False)) == ["35B", "4B"]
    assert named(Machine("Xeon", 2 * GB, gpu=False)) == []


def test_the_recommended_models_are_sorted_and_leave_memory_for_rows() -> None:
    day, models = recommended_models()
    assert day <= date.today()  # noqa: DTZ011
    assert models == sorted(models, key=lambda each: -each.weights)
    for each in models:
        assert each.weights <= WEIGHTS_SHARE * each.memory * 2**30, each.name
        assert 0 < each.read <= each.weights


def test_a_mac_is_recognised_by_its_chip() -> None:
    found = this_machine(lambda command: "Apple M4 Pro\n", "Darwin")
    assert (found.chip, found.gpu) == ("Apple M4 Pro", True)


def test_an_nvidia_gpu_counts_only_if_mlx_can_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Sequence[str]) -> str:
        return "NVIDIA GeForce RTX 4090, 24564\nNVIDIA T4, 15360\n"

    monkeypatch.setattr(recommended, "installed_version", lambda package: "13")
    found = this_machine(run, "Linux")
    assert found == Machine("NVIDIA GeForce RTX 4090", 24564 * 2**20)
    assert not this_machine(lambda command: "", "Linux").gpu
    monkeypatch.setattr(recommended, "installed_version", lambda package: "")
    assert not this_machine(run, "Linux").gpu


def test_memory_and_chip_of_this_machine_are_found() -> None:
    found = this_machine()
    assert found.memory > GB
    assert found.chip


def test_recommendations_use_the_limit_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its models take memory that would not count as free now."""
    monkeypatch.delenv("MLX_PROVIDER_MEMORY_LIMIT", raising=False)
    stats = SimpleNamespace(memory=MemoryStats(limit=7))
    running = SimpleNamespace(stats=lambda: stats, close=lambda: None)
    monkeypatch.setattr(connection, "local_client", lambda environ: running)
    assert recommended.device_memory({}) == 7
    assert recommended.device_memory({"MLX_PROVIDER_MEMORY_LIMIT": "5"}) == 5
