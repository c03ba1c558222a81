"""`mlx-provider doctor`: what it prints, its JSON and exit code, and one token end to end."""

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from mlx_provider import __version__
from mlx_provider.client.connection import Connections
from mlx_provider.doctor import STATES, Subject, examine, model
from mlx_provider.errors import EngineUnavailable


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but loopback is asked."""
    monkeypatch.setenv("HOME", str(tmp_path))
    ask = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        local = not isinstance(address, tuple) or address[0] in ("127.0.0.1", "::1")
        assert local, f"asked the network: {address}"
        ask(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


def run(*arguments: str) -> tuple[int, str]:
    result = invoke("doctor", *arguments, plugins=None)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout


def test_doctor_json_lists_the_findings_with_the_worst_first() -> None:
    code, text = run("demo", "--quick", "--json")
    found = json.loads(text)
    assert code == 0
    assert list(found) == ["format", "version", "model", "healthy", "findings"]
    assert (found["format"], found["version"], found["model"]) == (1, __version__, "demo")
    assert found["healthy"] is True
    for each in found["findings"]:
        assert list(each) == ["name", "state", "what", "remedy"]
        assert each["state"] in STATES
        assert all(isinstance(value, str) for value in each.values())
        assert each["remedy"] or each["state"] in ("ok", "note")
    ranks = [STATES.index(each["state"]) for each in found["findings"]]
    assert ranks == sorted(ranks)
    assert {"versions.mlx", "plugins.working", "template.round_trip"} <= {
        each["name"] for each in found["findings"]
    }


def test_doctor_prints_failures_first_with_their_remedies(tmp_path: Path) -> None:
    code, text = run(str(tmp_path), "--quick")
    assert code == 1
    first, *others = text.splitlines()
    assert first.startswith("fail")
    assert "model.found" in first
    assert any("-> " in line for line in others[:4])
    assert text.rstrip().splitlines()[-1].startswith("1 fail")
    assert json.loads(run(str(tmp_path), "--quick", "--json")[1])["healthy"] is False


def test_doctor_without_a_model_skips_the_checks_of_a_model() -> None:
    code, text = run()
    assert code == 0
    assert "name a model" in text
    assert "model.found" not in text


@pytest.mark.sweep
def test_doctor_generates_one_token_through_a_real_proxy(tmp_path: Path) -> None:
    """No process is left."""
    run_dir = Path(os.environ["MLX_PROVIDER_RUNTIME_DIR"]) / "examined"
    environ = {**os.environ, "MLX_PROVIDER_RUNTIME_DIR": str(run_dir)}
    here = Subject("demo-hybrid", environ=environ, home=tmp_path)
    found = {each.name: each for each in examine(here)}
    assert found["proxy.token"].state == "ok", found["proxy.token"]
    assert found["speculation.head"].what.endswith("has a head for drafts")
    connections = Connections(environ)
    try:
        pid = connections.client(None, None).health().pid
    except EngineUnavailable:
        pid = 0
    finally:
        connections.close()
    if pid:
        os.kill(pid, signal.SIGTERM)
    assert pid == 0, "the engine that was started for one token still runs"


def test_a_proxy_that_ends_at_its_start_is_a_failed_finding(
    monkeypatch: pytest.MonkeyPatch, subject: Callable[..., Subject]
) -> None:
    def refuse(*given: Any, **more: Any) -> Any:
        raise EngineUnavailable("the LiteLLM proxy ended with exit code 3")

    monkeypatch.setattr(model, "start_proxy", refuse)
    found = {each.name: each for each in examine(subject("demo"))}
    assert found["proxy.token"].state == "fail"
    assert "exit code 3" in found["proxy.token"].what
