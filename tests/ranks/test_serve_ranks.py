"""The command `serve-ranks`: it becomes the supervisor, which gets its options."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mlx_provider.errors import BadRequest
from mlx_provider_ranks import mlx_register_commands


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines that replaced the process."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: became.append(command))
    return became


def called(*words: str) -> BaseException | None:
    cli = typer.Typer()
    mlx_register_commands(cli)
    return CliRunner().invoke(cli, words).exception


def test_the_options_go_to_the_supervisor(run: list[list[str]], tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text("[]")
    assert called("--hostfile", str(hosts), "--backend", "ring", "--drain", "2") is None
    assert called("--ranks", "2", "--host", "127.0.0.1", "--port", "0") is None
    supervisor = [sys.executable, "-P", "-m", "mlx_provider_ranks"]
    assert run == [
        [*supervisor, "--hostfile", str(hosts), "--backend", "ring", "--drain", "2.0"],
        [*supervisor, "--ranks", "2", "--host", "127.0.0.1", "--port", "0"],
    ]


def test_no_drain_lasts_for_ever(run: list[list[str]]) -> None:
    assert isinstance(called("--ranks", "2", "--drain", "inf"), BadRequest)
    assert run == []
