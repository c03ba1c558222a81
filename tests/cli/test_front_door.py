"""Bare `mlx-provider`."""

from pathlib import Path

import pytest

from command_line import invoke
from python_process import run_python

CODE = """
import atexit, sys
heavy = {"litellm", "mlx", "mlx_lm", "mlx_vlm", "transformers", "uvicorn", "httpx"}
atexit.register(lambda: print("HEAVY", sorted(heavy & sys.modules.keys())))
sys.argv = ["mlx-provider"]
from mlx_provider.cli import main
main()
"""


def test_bare_mlx_provider_prints_next_steps_and_imports_no_heavy_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--maker--small").mkdir()
    done = run_python(CODE)
    assert "HEAVY []" in done.stdout
    assert "does not run" in done.stdout
    assert "maker/small" in done.stdout
    assert "mlx-provider init" in done.stdout
    assert "says how to install one" in done.stdout
    assert "  mlx-provider up mlx-community/" in done.stdout


def test_the_bare_command_lists_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "codex").write_text("#!/bin/sh\n")
    (tmp_path / "codex").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(tmp_path))
    shown = invoke(plugins="clients").stdout
    assert "agents  codex\n" in shown
    assert "mlx-provider launch codex" in shown
