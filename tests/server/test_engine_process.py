"""The process around the app: socket, key, port, signals, idle end."""

import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_provider.server.run import SWITCH
from waiting import PATIENCE, wait_until

Spawn = Callable[..., Any]


def test_socket_and_lock_are_private_to_the_user(engine: Any) -> None:
    for name in ("engine.sock", "engine.lock"):
        mode = stat.S_IMODE((engine.folder / name).lstat().st_mode)
        assert mode & 0o077 == 0, name
    assert (engine.folder / "engine.lock").read_text().strip() == str(engine.process.pid)


def test_the_thread_switch_interval_of_the_engine_process_is_short(engine: Any) -> None:
    said = [event.get("content") for line in engine.lines("switch") for event in line]
    assert [float(text) for text in said if text] == [pytest.approx(SWITCH)]


def test_a_second_engine_of_the_same_folder_is_refused(engine: Any, spawn: Spawn) -> None:
    second = spawn(folder=engine.folder)
    assert f"an engine already runs in {engine.folder}" in second.line
    assert second.process.wait(PATIENCE) == 1
    assert engine.lines("count 1 0")


def test_a_stale_socket_is_replaced(spawn: Spawn) -> None:
    first = spawn()
    first.end(signal.SIGKILL)
    assert (first.folder / "engine.sock").is_socket()
    second = spawn(folder=first.folder)
    assert second.lines("count 1 0")


def test_a_file_in_place_of_the_socket_is_kept_and_the_start_refused(spawn: Spawn) -> None:
    with tempfile.TemporaryDirectory(prefix="mlxp") as name:
        (Path(name) / "engine.sock").write_text("mine")
        engine = spawn(folder=Path(name))
        assert "is not a socket: remove it" in engine.line
        assert engine.process.wait(PATIENCE) == 1
        assert (Path(name) / "engine.sock").read_text() == "mine"


def test_a_folder_open_to_others_is_refused(spawn: Spawn) -> None:
    with tempfile.TemporaryDirectory(prefix="mlxp") as name:
        Path(name).chmod(0o755)
        engine = spawn(folder=Path(name))
        assert f"chmod 700 {name}" in engine.line
        assert engine.process.wait(PATIENCE) == 1


def test_tcp_needs_the_key_when_one_is_set(spawn: Spawn) -> None:
    engine = spawn("--port", "0", MLX_PROVIDER_API_KEY="secret")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        for path in ("/health", "/metrics", "/v1/models", "/v1/attach", "/v1/stats"):
            response = engine.http.get(path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "unauthorized"
        assert engine.http.post("/v1/generate", headers=headers).status_code == 401
        assert engine.http.delete("/cache", headers=headers).status_code == 401
    key = {"authorization": "Bearer secret"}
    for path in ("/health", "/v1/stats"):
        assert engine.http.get(path, headers=key).is_success
        page = {**key, "origin": "http://elsewhere"}
        assert engine.http.get(path, headers=page).status_code == 403


def test_port_in_use_is_one_line_that_names_the_port(spawn: Spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = spawn("--port", str(port))
        assert engine.process.wait(PATIENCE) == 1
        assert engine.line == (
            f"mlx-provider: port {port} on 127.0.0.1 is in use: choose another with --port\n"
        )
        assert engine.process.stderr.read() == ""


def test_a_wrong_setting_is_one_line(spawn: Spawn) -> None:
    engine = spawn(MLX_PROVIDER_MAX_ROWS="many")
    assert "MLX_PROVIDER_MAX_ROWS" in engine.line
    assert engine.process.wait(PATIENCE) == 1


@pytest.mark.parametrize(
    ("close", "message"), [("", "closed by the service"), ("silent", "was stopped")]
)
def test_sigterm_ends_requests_in_flight_with_a_typed_event(
    spawn: Spawn, close: str, message: str
) -> None:
    engine = spawn(FAKE_CLOSE=close)
    with engine.stream("wait") as response:
        pieces = response.iter_raw()
        next(pieces)
        engine.process.send_signal(signal.SIGTERM)
        last = json.loads(b"".join(pieces).splitlines()[-1])[-1]
    assert (last["type"], last["error"]["status"]) == ("failed", 503)
    assert message in last["error"]["message"]
    assert engine.process.wait(PATIENCE) == 0
    assert not (engine.folder / "engine.sock").exists()


def test_sigterm_does_not_wait_for_a_submit(spawn: Spawn) -> None:
    engine = spawn()
    body = b'{"model": "fake", "prompt": "slow 3600", "id": "loads"}'
    head = b"POST /v1/generate HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n\r\n" % len(body)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(engine.folder / "engine.sock"))
        client.sendall(head + body)
        engine.await_seen("submitted", "loads")
        engine.process.send_signal(signal.SIGTERM)
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    assert b" 503 " in answer.splitlines()[0]
    assert b"the engine is stopping" in answer
    assert engine.process.wait(PATIENCE) == 0


def test_an_engine_on_demand_ends_when_nobody_uses_it(spawn: Spawn, wait_until: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="mlxp") as name:
        lock = os.open(Path(name) / "engine.lock", os.O_CREAT | os.O_RDWR, 0o600)
        clock = Path(name) / "clock"
        clock.touch()
        os.utime(clock, (0, 0))
        engine = on_demand(Path(name), lock, idle="0.2", clock=clock)
        os.close(lock)
        transport = httpx.HTTPTransport(uds=f"{name}/engine.sock")
        wait_until(lambda: _listens(Path(name) / "engine.sock"))
        body = {"model": "fake", "prompt": "count 20 0.02"}
        with (
            httpx.Client(transport=transport, base_url="http://engine", timeout=30) as client,
            client.stream("GET", "/v1/attach") as attached,
        ):
            pieces = attached.iter_raw()  # closed with the last name for it
            next(pieces)
            os.utime(clock, (1000, 1000))
            with pytest.raises(subprocess.TimeoutExpired):
                engine.wait(0.5)  # it looks every 0.05 s
            with client.stream("POST", "/v1/generate", json=body) as reply:
                attached.close()
                os.utime(clock, (2000, 2000))
                assert b'"done"' in reply.read()
        later = itertools.count(3000, 1000)  # it may learn of the last client's end late

        def has_ended() -> bool:
            os.utime(clock, (next(later),) * 2)
            return engine.poll() is not None

        wait_until(has_ended)
        assert engine.returncode == 0


def _listens(path: Path) -> bool:
    """The file is there before the engine listens."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def on_demand(
    folder: Path, lock: int, idle: str, clock: Path | None = None, tell: int | None = None
) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("fake_engine.py")
    report = () if tell is None else ("--ready-fd", str(tell))
    return subprocess.Popen(
        [sys.executable, str(script), "--lock-fd", str(lock), *report],
        pass_fds=(lock,) if tell is None else (lock, tell),
        env={
            **os.environ,
            "MLX_PROVIDER_RUNTIME_DIR": str(folder),
            "MLX_PROVIDER_IDLE_TIMEOUT": idle,
            "FAKE_CLOCK": "" if clock is None else str(clock),
        },
    )


def test_an_engine_process_ends_when_its_engine_thread_has_died(spawn: Spawn) -> None:
    engine = spawn()
    engine.lines("die")
    assert engine.process.wait(PATIENCE) == 1


def test_an_engine_reports_its_start_to_the_client_only_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file of the report is closed then, and its number may be another file's."""
    tmp_path.chmod(0o700)
    (tmp_path / "engine.log").touch(0o600)
    lock = os.open(tmp_path / "engine.lock", os.O_CREAT | os.O_RDWR, 0o600)
    ready, tell = os.pipe()
    engine = on_demand(tmp_path, lock, idle="600", tell=tell)
    os.close(lock)
    os.close(tell)
    with os.fdopen(ready, "rb") as reports:
        assert reports.read()
    transport = httpx.HTTPTransport(uds=f"{tmp_path}/engine.sock")
    with httpx.Client(transport=transport, base_url="http://engine", timeout=30) as client:
        client.post("/v1/generate", json={"model": "fake", "prompt": "die"})
    assert engine.wait(PATIENCE) == 1
    said = capfd.readouterr().err
    assert "has died" in said
    assert "starting client" not in said


def test_an_engine_on_tcp_restarts_when_its_engine_thread_has_died(spawn: Spawn) -> None:
    """At the same address, also if the system chose its port."""
    engine = spawn("--port", "0", MLX_PROVIDER_API_KEY="secret")
    engine.http.headers["authorization"] = "Bearer secret"
    engine.lines("die")

    def is_new() -> bool:
        with suppress(httpx.TransportError):
            return engine.seen()["submitted"] == []
        return False

    wait_until(is_new)
    assert engine.lines("count 1 0")
    assert engine.end() == 0


def test_an_engine_with_a_dead_engine_thread_ends_by_a_signal(spawn: Spawn) -> None:
    """While it waits for replies, and does not start anew."""
    engine = spawn("--port", "0", "--drain", "3600", MLX_PROVIDER_API_KEY="secret")
    engine.http.headers["authorization"] = "Bearer secret"
    with engine.stream("wait") as reply:
        next(reply.iter_raw())
        engine.lines("die")
        address = (engine.http.base_url.host, engine.http.base_url.port)
        wait_until(lambda: not is_open(address))
        assert engine.end() == 0


def is_open(address: tuple[str, int]) -> bool:
    with socket.socket() as client:
        return client.connect_ex(address) == 0


def test_an_engine_whose_socket_is_gone_ends(spawn: Spawn) -> None:
    engine = spawn()
    with engine.stream("count 80 0.01") as response:
        pieces = response.iter_raw()
        next(pieces)
        (engine.folder / "engine.sock").unlink()
        assert b'"done"' in b"".join(pieces)
    assert engine.process.wait(PATIENCE) == 0
