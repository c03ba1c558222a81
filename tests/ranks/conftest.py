"""Rank groups on this machine: processes of mlx's own launcher, joined by a ring over loopback."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.testing.tiny_models import build

SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Heads of which four ranks have a whole number each."""
SECONDS = 300
MARK = "RANK-SAYS "

Launch = Callable[..., list[Any]]


def free_ports(count: int) -> int:
    """The first of `count` ports that follow one another and are free."""
    while True:
        with socket.socket() as asked:
            asked.bind(("127.0.0.1", 0))
            first: int = asked.getsockname()[1]
        if first + count < 2**16 and all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def said(value: Any) -> str:
    """A line by which a rank's program tells its rank and a JSON value."""
    return MARK + json.dumps(value)


@pytest.fixture(scope="session")
def launch() -> Launch:
    """`launch(script, ranks, *arguments)`: what each rank has told by `said`, in order of rank.

    A script prints `said([rank, value])` once on every rank.
    """

    def run(script: Path, ranks: int, *arguments: str) -> list[Any]:
        launcher = shutil.which("mlx.launch", path=Path(sys.executable).parent)
        assert launcher is not None
        at = ["-n", str(ranks), "--backend", "ring", "--starting-port", str(free_ports(ranks))]
        command = [launcher, *at, "--", sys.executable, str(script), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=dict(os.environ)
        )
        lines = [line for line in done.stdout.splitlines() if MARK in line]
        told = sorted(json.loads(line.partition(MARK)[2]) for line in lines)
        assert [rank for rank, _ in told] == list(range(ranks)), done.stdout + done.stderr
        return [value for _, value in told]

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny model whose heads divide by four, by family name."""

    def make(name: str, **more: Any) -> Path:
        folder = tmp_path_factory.mktemp("split") / name
        return build(folder, name, **(SIZES | more))

    return make
