"""The program that runs real clients, as far as it goes without them."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from mlx_provider.client.address import Address
from mlx_provider.client.http import HttpClient
from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway.proxy import Proxy

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents"
MODULES = [path.stem for path in EXAMPLE.glob("*.py") if path.stem != "__main__"]


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Those of the example, which is a folder that Python runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.setenv("BASE", "")
        patch.setenv("OPENAI_API_KEY", "")
        patch.setenv("LOOP", "")
        yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def test_every_client_is_one_that_is_launched(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, installed = modules["clients"], modules["installed"]
    monkeypatch.setattr(installed.Installed, "native", lambda self, pattern: tmp_path / pattern)
    monkeypatch.setattr(installed.Installed, "node", tmp_path)
    known = modules["running"].RECORDS.clients
    for agent in clients.AGENTS:
        assert agent.record in known
        assert agent.program(installed.Installed(tmp_path))
        assert "Hello" in agent.alone("Hello")
        assert re.fullmatch(r"\d+(\.\d+)+", installed.version(agent.package))


def test_every_library_is_pinned(modules: dict[str, ModuleType]) -> None:
    functions, clients = vars(modules["libraries"]), modules["python_clients"]
    for library in clients.LIBRARIES:
        assert callable(functions[library.function])
        if library.environment != "gateway":
            assert modules["installed"].version(library.package, library.environment)


def test_logs_are_read(modules: dict[str, ModuleType]) -> None:
    gateway = modules["gateway"]
    line = (
        "INFO request 0f29: tool_calls; queued 0.009 s, prefill 5 of 19 new / 1775 cached tokens, "
        "first token 0.013 s, 70 tokens, 632.1 tok/s; left the stored prefix at token 8"
    )
    (found,) = gateway.ENDED.finditer(line)
    assert (found["reason"], found["new"], found["cached"]) == ("tool_calls", "19", "1775")
    (found,) = gateway.ANSWERED.finditer('"POST /v1/messages?beta=true HTTP/1.1" 400')
    assert found["status"] == "400"


def test_the_table(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    outcome, table = modules["scenarios"].Outcome, modules["table"]
    merged = modules["results"].merged
    first = {"One 1.0": {"plain": outcome(True, "yes"), "tools": outcome(True, "yes")}}
    merged(tmp_path / "found.json", first | {"two (2)": {"library": outcome(True, "3 calls")}})
    rows = merged(tmp_path / "found.json", {"One 1.0": {"tools": outcome(False, "a | b")}})
    text = table.written("now", 400, rows)
    assert "| One 1.0 | yes | ✗ a \\| b | – | – | – | – | – |" in text
    assert "prefill of 400 s" in text
    assert "| two (2) | 3 calls |" in text


def test_an_unknown_client_is_an_error() -> None:
    command = [sys.executable, str(EXAMPLE), "--client", "Codec"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'Codec'" in done.stderr
    assert "installing" not in done.stderr


@pytest.mark.parametrize("gone", ["proxy", "engine"])
def test_a_gateway_that_is_gone_is_told_with_its_log(
    modules: dict[str, ModuleType], tmp_path: Path, gone: str
) -> None:
    """The client would wait for minutes."""
    for name in ("proxy", "engine"):
        (tmp_path / f"{name}.log").write_text(f"why the {name} ended")
    with listening() as url, waiting() as alive, waiting() as client:
        ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        ended.wait()
        proxy = Proxy(ended if gone == "proxy" else alive, url, "key", tmp_path / "proxy.log")
        engine = HttpClient(Address("http://engine", str(tmp_path / "no.sock")))
        gateway = modules["gateway"].Gateway(proxy, engine, tmp_path / "engine.log")
        running = modules["running"].Running(client, tmp_path, tmp_path / "said", 0.0, gateway)
        with pytest.raises(EngineUnavailable, match=f"why the {gone} ended"):
            running.wait(100)
        assert client.returncode == -signal.SIGKILL


def waiting() -> subprocess.Popen[bytes]:
    """A process that ends with its `with` block."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


@contextmanager
def listening() -> Iterator[str]:
    """A server that has an answer to everything."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
