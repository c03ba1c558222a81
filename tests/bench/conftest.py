"""The command line of the benchmarks, in a process of its own or in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlx_provider_bench import commands
from mlx_provider_bench.commands import running

ROOT = Path(__file__).parents[2]
Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def bench() -> Bench:
    """`mlx-provider bench ...` in a fresh process; its JSON line."""

    def run(*arguments: str) -> dict[str, Any]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from mlx_provider.cli import main; main()",
                "bench",
                *arguments,
            ],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr
        return result_of(done.stdout)

    return run


@pytest.fixture
def bench_here(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The same in this process, which has loaded another BLAS: for what computes little."""
    monkeypatch.setattr(running, "preload", lambda: None)

    def run(*arguments: str) -> dict[str, Any]:
        done = CliRunner().invoke(commands.bench, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return result_of(done.stdout)

    return run


def result_of(told: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(told.splitlines()[-1])
    assert {"device", "blas", "dtype", "load_average"} <= result.keys()
    return result


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Sizes that take no time."""
    return ("--hidden", "64", "--layers", "3")
