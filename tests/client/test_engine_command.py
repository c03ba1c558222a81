"""`mlx-provider engine`: what it tells of an engine, of none, and of what is no engine."""

import contextlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from command_line import invoke
from mlx_provider.client import runtime_folder
from mlx_provider.client.runtime_folder import EngineLock
from mlx_provider.errors import EngineUnavailable, OtherProtocol
from mlx_provider.protocol.events import Failed
from mlx_provider.protocol.requests import GenerateRequest
from waiting import is_gone

NOBODY = 2**30
"""A process id that no system gives."""
Command = Callable[..., Result]


@pytest.fixture
def command(local: Any, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command line on the folder of `local`; errors of ours are raised."""
    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(local.folder))

    def run(*arguments: str) -> Result:
        result = invoke("engine", *arguments)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


def test_engine_commands_report_that_no_engine_runs(command: Command, local: Any) -> None:
    for told in (command("status"), command("stop")):
        assert "no engine runs in" in told.stdout
    assert (command("status").exit_code, command("stop").exit_code) == (3, 0)
    assert json.loads(command("status", "--json").stdout)["engine"] == "none"
    assert command("logs").exit_code == 3
    assert not list(local.folder.iterdir()), "asking makes no file"


def test_engine_status_and_stop_work(command: Command, local: Any, wait_until: Any) -> None:
    client = local.client()
    running = client.submit(GenerateRequest(model="fake", prompt="wait"))
    pid = client.health().pid
    status = command("status")
    assert status.exit_code == 0
    assert f"process {pid}" in status.stdout
    told = json.loads(command("status", "--json").stdout)
    assert (told["engine"], told["pid"], told["other_settings"]) == ("runs", pid, [])
    assert f"process {pid}" in command("logs", "-n", "3").stdout
    assert f"process {pid} ends as soon as" in command("stop", "--idle").stdout
    assert f"process {pid} has ended" in command("stop").stdout
    wait_until(lambda: is_gone(pid))
    last = [event for _ in range(9) for event in running.get(300)][-1]
    assert isinstance(last, Failed), "who waits is told"
    assert last.error.code == "engine_unavailable"


def test_restart_ends_engine(command: Command, local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = local.client()
    client.submit(GenerateRequest(model="fake", prompt="text x"))
    pid = client.health().pid
    monkeypatch.setenv("MLX_PROVIDER_MAX_ROWS", "7")
    status = command("status").stdout
    assert "other than this shell: MLX_PROVIDER_MAX_ROWS: unset, here 7" in status
    assert f"engine process {pid} has ended" in command("restart").stdout
    assert command("status").exit_code == 3
    client.submit(GenerateRequest(model="fake", prompt="text x"))
    assert client.health().pid != pid


@pytest.mark.parametrize("words", [("restart",), ("stop", "--idle")])
def test_stop_ends_engines_of_other_versions(command: Command, local: Any, words: Any) -> None:
    with pytest.raises(OtherProtocol):
        local.client(FAKE_PROTOCOL="99").submit(GenerateRequest(model="fake", prompt="wait"))
    pid = (local.folder / "engine.lock").read_text().strip()
    assert f"engine process {pid} has ended" in command(*words).stdout


def test_engine_commands_refuse_a_socket_that_is_no_engine(
    command: Command, local: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = local.folder / "engine.sock"
    (local.folder / "engine.lock").write_text(f"{NOBODY}\n")  # of an engine long ago
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        for part in ("status", "stop", "restart"):
            with pytest.raises(EngineUnavailable, match="no engine of mlx-provider listens on"):
                command(part)
    for part in ("status", "stop"):
        assert "was left behind by one that was killed" in command(part).stdout
    path.unlink()
    path.write_text("")
    with pytest.raises(EngineUnavailable, match="is not a socket: remove it"):
        command("status")
    path.unlink()
    lock = EngineLock.try_take(local.folder / "engine.lock")
    assert lock is not None
    with pytest.raises(EngineUnavailable, match=f"process {NOBODY} does not answer"):
        command("status")
    lock.release()
    monkeypatch.setattr(runtime_folder.os, "getuid", lambda: 12345)
    with pytest.raises(EngineUnavailable, match="belongs to another user: set MLX_PROVIDER_RUN"):
        command("stop")


def test_engine_status_reports_the_files_of_a_killed_engine(command: Command, local: Any) -> None:
    client = local.client()
    client.submit(GenerateRequest(model="fake", prompt="text x"))
    local.end()
    with contextlib.suppress(EngineUnavailable):
        client.health()
    status = command("status")
    assert (status.exit_code, "left behind" in status.stdout) == (3, True)


def test_remote_engines_cannot_be_ended(command: Command, tcp_engine: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o600)
    at = ("--api-base", tcp_engine)
    told = command("status", *at, "--api-key-file", str(key))
    assert (told.exit_code, f"where {tcp_engine} was started" in told.stdout) == (0, True)
    assert [command(part, *at).exit_code for part in ("stop", "restart", "logs")] == [2] * 3


def test_engine_logs_prints_the_last_lines(command: Command, local: Any) -> None:
    assert command("logs").exit_code == 3
    lock = EngineLock.try_take(local.folder / "engine.lock")
    with pytest.raises(EngineUnavailable, match="the engine writes to its terminal"):
        command("logs")
    lock.release()
    (local.folder / "engine.log").write_text("one\ntwo\nthree\n")
    assert command("logs", "-n", "2").stdout == "two\nthree\n"
