"""`mlx-provider serve`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mlx_provider.cli.app import build
from mlx_provider.registry import PluginRegistry


def test_a_public_address_needs_a_key() -> None:
    command = [sys.executable, "-c", "from mlx_provider.cli import main; main()"]
    command += ["serve", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "--api-key" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_does_not_show_in_the_process_list(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(
        os, "execve", lambda path, argv, environment: started.append((argv, environment))
    )
    cli = build(PluginRegistry.discover({"MLX_PROVIDER_PLUGINS": ""}))
    CliRunner().invoke(cli, ["serve", "--port", "0", "--api-key", "secret"])
    ((argv, environment),) = started
    assert argv[-2:] == ["--port", "0"]
    assert environment["MLX_PROVIDER_API_KEY"] == "secret"
    assert "secret" not in argv
