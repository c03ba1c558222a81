"""Metal's command buffers are larger on the chips that gain by it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mlx_provider.client.identity import identity
from mlx_provider.upstream.command_buffers import LIMITS, enlarge


@pytest.mark.parametrize("chip", ["Apple M1 Ultra", "Apple M3", "Apple M4 Max\n"])
def test_chips_that_gain(chip: str) -> None:
    environ: dict[str, str] = {}
    enlarge(environ, chip)
    assert environ == LIMITS


@pytest.mark.parametrize("chip", ["Apple M5 Max", "Apple M10", "Intel(R) Xeon(R)", ""])
def test_others(chip: str) -> None:
    environ: dict[str, str] = {}
    enlarge(environ, chip)
    assert environ == {}


def test_values_of_the_user_stay() -> None:
    environ = {"MLX_MAX_OPS_PER_BUFFER": "7"}
    enlarge(environ, "Apple M2")
    assert environ == LIMITS | {"MLX_MAX_OPS_PER_BUFFER": "7"}


def test_a_client_wants_no_other_engine_for_it() -> None:
    assert identity(LIMITS) == identity({})
    assert identity({"MLX_DISABLE_COMPILE": "1"}) != identity({})


def test_they_are_set_before_mlx_is_imported() -> None:
    program = (
        "import sys; from mlx_provider.upstream import command_buffers\n"
        "seen = []; command_buffers.enlarge = lambda: seen.append('mlx.core' in sys.modules)\n"
        "from mlx_provider.server import run; run.enlarge = command_buffers.enlarge\n"
        "run.prepare_mlx()\n"
        "assert seen == [False], seen"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
