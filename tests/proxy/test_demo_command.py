"""`mlx-provider demo`, as a user runs it: nothing but the package, an empty HOME, no network."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from command_line import invoke

CODE = "import typer; from mlx_provider.cli.demo import demo; typer.run(demo)"


@pytest.fixture
def environ(tmp_path):
    """Nothing of the tests, and no hint of where the network or a model might be."""
    keep = ("PATH", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    own = {name: os.environ[name] for name in keep if name in os.environ}
    dead = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    root = str(Path(__file__).parents[2])
    paths = f"{root}{os.pathsep}{root}/plugins"
    return {**own, **dead, "HOME": str(tmp_path), "PYTHONPATH": paths, "COLUMNS": "200"}


def test_the_demo_runs_without_network_in_an_empty_home(environ, tmp_path):
    done = subprocess.run(
        [sys.executable, "-u", "-c", CODE],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout
    assert "Your name is Maria." in told
    assert told.count("\nok ") == 6
    assert "mlx-provider up demo starts the same to stay" in told
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_the_demo_with_130(monkeypatch):
    @contextmanager
    def stage():
        os.kill(os.getpid(), signal.SIGINT)
        yield

    monkeypatch.setattr("mlx_provider.demo.stage", stage)
    assert invoke("demo").exit_code == 128 + signal.SIGINT
