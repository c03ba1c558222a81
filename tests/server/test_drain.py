"""An engine on TCP that was told to stop ends what it holds and takes nothing more."""

import json
import signal
import socket
import time
from collections.abc import Callable
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from waiting import PATIENCE

Spawn = Callable[..., Any]
BODY = b'{"model": "fake", "prompt": "count 1 0"}'


@pytest.fixture
def draining(spawn: Spawn) -> Any:
    engine = spawn("--port", "0", "--drain", "60", MLX_PROVIDER_API_KEY="secret")
    engine.http.headers["authorization"] = "Bearer secret"
    return engine


def test_a_draining_engine_finishes_its_streams_and_refuses_new_requests(
    draining: Any, tmp_path: Path
) -> None:
    may_end = tmp_path / "may-end"
    with draining.stream(f"until {may_end} 40 0.02") as response, _begun(draining) as late:
        pieces = response.iter_raw()
        begun = next(pieces)
        draining.process.send_signal(signal.SIGTERM)
        _await_nobody(draining.http.base_url)
        refused = _completed(late)
        may_end.touch()
        events = [e for line in (begun + b"".join(pieces)).splitlines() for e in json.loads(line)]
    assert refused.status == 503
    error = json.loads(refused.read())["error"]
    assert error["code"] == "engine_unavailable", "so that it is sent elsewhere"
    said = "".join(event["content"] for event in events if event["type"] == "delta")
    assert said == "begun " + "".join(f"{n} " for n in range(40))
    assert events[-1]["type"] == "done"
    assert draining.process.wait(PATIENCE) == 0


def test_a_second_sigterm_ends_a_draining_engine_at_once(draining: Any) -> None:
    with draining.stream("wait") as response:
        pieces = response.iter_raw()
        next(pieces)
        draining.process.send_signal(signal.SIGTERM)
        _await_nobody(draining.http.base_url)
        draining.process.send_signal(signal.SIGTERM)
        last = json.loads(b"".join(pieces).splitlines()[-1])[-1]
    assert (last["type"], last["error"]["status"]) == ("failed", 503)
    assert draining.process.wait(PATIENCE) == 0


def test_the_drain_option_without_host_or_port_is_refused(spawn: Spawn) -> None:
    engine = spawn("--drain", "5")
    assert "add --host or --port" in engine.line
    assert engine.process.wait(PATIENCE) == 1


def _begun(engine: Any) -> socket.socket:
    """A request whose body the engine waits for."""
    url = engine.http.base_url
    client = socket.create_connection((url.host, url.port), PATIENCE)
    names = {
        "host": url.host,
        **engine.http.headers,
        "content-type": "application/json",
        "content-length": len(BODY),
        "expect": "100-continue",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in names.items())
    client.sendall(f"POST /v1/generate HTTP/1.1\r\n{head}\r\n".encode())
    assert client.recv(4096).startswith(b"HTTP/1.1 100 ")
    return client


def _completed(client: socket.socket) -> HTTPResponse:
    """The reply to it once its body is sent."""
    client.sendall(BODY)
    reply = HTTPResponse(client)
    reply.begin()
    return reply


def _await_nobody(url: httpx.URL) -> None:
    """Until no connection can be made: the server closes its socket in its next turn."""
    assert url.port is not None
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            socket.create_connection((url.host, url.port)).close()
        except ConnectionError:  # reset where it closes just now, refused from then on
            return
    raise AssertionError("it listens still")
