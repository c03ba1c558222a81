"""The command line of the benchmarks, in a process of its own."""

from __future__ import annotations

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
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert {"device", "blas", "dtype", "load_average"} <= result.keys()
        return result

    return run


@pytest.fixture(scope="session")
def small() -> tuple[str, ...]:
    """Sizes that take no time."""
    return ("--hidden", "64", "--layers", "3")
