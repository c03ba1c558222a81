"""`mlx-provider demo`, as a user runs it: nothing but the package, an empty HOME, no network."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from mlx_provider.cli.demo import demo
from mlx_provider.demo.stage import Stage

CODE = "import typer; from mlx_provider.cli.demo import demo; typer.run(demo)"


@pytest.fixture
def environ(tmp_path):
    """The caller's paths, and no hint of where the network or a model might be."""
    keep = ("PATH", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
    own = {name: os.environ[name] for name in keep if name in os.environ}
    dead = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join([own.get("PYTHONPATH", ""), root, f"{root}/plugins"]).strip(os.pathsep)
    return {**own, **dead, "HOME": str(tmp_path), "PYTHONPATH": paths, "COLUMNS": "200"}


@pytest.fixture
def staged(proxy, own_engine, monkeypatch):
    """The tests' own proxy and engine in the place of the demo's; what was begun and ended."""
    seen = []

    @contextmanager
    def stage(port):
        seen.append("begun")
        yield Stage(proxy, own_engine)
        seen.append("ended")

    monkeypatch.setattr("mlx_provider.demo.stage.stage", stage)
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    return seen


def test_every_check_passes_and_then_it_ends(staged):
    app = typer.Typer()
    app.command()(demo)
    run = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert run.exit_code == 0, run.output
    assert_all_is_well(run.stdout)
    assert staged == ["begun", "ended"]


def assert_all_is_well(told):
    assert "Your name is Maria." in told
    assert told.count("\nok ") == 6
    assert re.search(r"[1-9]\d* of [1-9]\d* guessed tokens held \(demo-hybrid, by mtp\)", told)
    assert "export OPENAI_BASE_URL=http://127.0.0.1:" in told


def sent_as_printed(told):
    """The answer to the printed curl line, as the shell would split it."""
    (line,) = (line for line in told.splitlines() if line.strip().startswith("curl "))
    _, url, *options = shlex.split(line)
    given = list(zip(options[::2], options[1::2], strict=True))
    headers = dict(value.split(": ") for option, value in given if option == "-H")
    (body,) = (value for option, value in given if option == "-d")
    reply = httpx.post(url, headers=headers, content=body, trust_env=False, timeout=60)
    return reply.raise_for_status().text


def test_keep_runs_until_it_is_told_to_end(environ, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", CODE, "--keep"],
        env=environ,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        told = ""
        for line in process.stdout:
            told += line
            if "coding agents" in line:
                break
        url = re.search(r"OPENAI_BASE_URL=(\S+)/v1", told)[1]
        key = re.search(r"OPENAI_API_KEY=(\S+)", told)[1]
        reply = httpx.get(
            f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}, trust_env=False
        )
        assert reply.json()["data"][0]["id"] == "demo"
        assert "Paris" in sent_as_printed(told)
        assert "trained on short answers" in told
        assert_all_is_well(told)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 128 + signal.SIGINT
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
