"""The command line of the benchmarks, in a process of its own or in this one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Bench = Callable[..., dict[str, Any]]


def from_process(*command: str) -> Bench:
    """The JSON line that a command writes in a fresh process."""

    def run(*arguments: str) -> dict[str, Any]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, *command, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0
        return result_of(done.stdout)

    return run


@pytest.fixture
def bench() -> Bench:
    """`mlx-provider bench ...`"""
    return from_process("-c", "from mlx_provider.cli import main; main()", "bench")


@pytest.fixture
def benchmark() -> Bench:
    """`python tests/benchmarks ...`"""
    return from_process(str(ROOT / "tests" / "benchmarks"))


def result_of(told: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    assert {"device", "blas", "cores", "load_average"} <= result.keys()
    return result
