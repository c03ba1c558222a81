"""The command line of the benchmarks: that of users in this process, with one engine for all."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import checkouts
from command_line import invoke
from mlx_provider.commands import EngineClient, separate_engine
from mlx_provider_bench import commands, model_speed, prefix_cache
from random_weights import write_model

Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small model."""
    return str(write_model(tmp_path_factory.mktemp("bench") / "mine", "llama", "float32", 64, 2))


@pytest.fixture(scope="session")
def engine() -> Iterator[tuple[EngineClient, dict[str, str]]]:
    with separate_engine() as running:
        yield running


@pytest.fixture
def bench(engine: tuple[EngineClient, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """`mlx-provider bench ...`; a benchmark with an engine and a process of its own is ended in
    `test_long_command.py`."""
    monkeypatch.setattr(commands, "preload", lambda: None)
    for module in (model_speed, prefix_cache):
        monkeypatch.setattr(module, "separate_engine", lambda: nullcontext(engine))

    def run(*arguments: str) -> dict[str, Any]:
        done = invoke("bench", *arguments, plugins=None)
        assert done.exit_code == 0, done.output
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert {"device", "blas", "cores", "load_average"} <= result.keys()
        return result | {"told": done.stderr}

    return run


@pytest.fixture
def benchmark() -> Bench:
    """`python tests/benchmarks ...` in a fresh process."""
    return lambda *arguments: checkouts.result_of(Path(__file__).parents[2], arguments, {})
