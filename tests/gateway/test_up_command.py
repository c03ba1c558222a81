"""`mlx-provider up` and `down`: a gateway that stays."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from command_line import invoke
from local_server import Handler, serving
from mlx_provider.client.runtime_folder import holder, is_held
from mlx_provider.config import state_folder
from mlx_provider.errors import EngineUnavailable
from mlx_provider.gateway import engine, persistent, proxy
from mlx_provider.gateway.models import candidate
from mlx_provider.gateway.persistent import GatewayFiles, Record, Running
from mlx_provider.gateway.proxy import Proxy
from named_plugins import discover
from ports import free_port

OURS = discover("qwen3_vl")
SERVED = candidate("demo", OURS, 2**33).served
LINUX = sys.platform == "linux"
RUN = "from mlx_provider.cli import main; main()"
FAKE_PROXY = """
import http.server, socket, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"{}"
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GatewayFiles:
    measured = state_folder() / "measurements.json"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = GatewayFiles()
    kept.prepare()
    assert {mode(each) for each in (kept.folder, *list(kept.folder.parents)[:2])} == {0o700}
    with suppress(FileNotFoundError):  # what an engine of other tests has measured
        shutil.copy(measured, kept.folder.parent)
    return kept


@pytest.fixture
def stand_in_proxy(
    kept: GatewayFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], int]]:
    """A process in the place of LiteLLM's proxy, and no engine; ends what is left of it."""
    script = tmp_path / "proxy.py"
    script.write_text(FAKE_PROXY)
    monkeypatch.setattr(proxy, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(engine, "warm_up", lambda *options: None)
    monkeypatch.setattr(engine, "_engine_line", lambda *engine: "none")
    started: list[Proxy] = []

    def start_proxy(*arguments: Any, **options: Any) -> Proxy:
        started.append(proxy.start_proxy(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(persistent, "start_proxy", start_proxy)
    yield free_port
    for each in started:
        each.stop()
        each.process.wait(300)


def run(*arguments: str) -> tuple[int, str, str]:
    result = invoke(*arguments, plugins=OURS)
    return result.exit_code, result.stdout, result.stderr + str(result.exception or "")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def holders(path: Path) -> set[int]:
    """Processes that have the file open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if link.readlink() == path:
                found.add(int(link.parts[2]))
    return found


def exported(shown: str) -> dict[str, str]:
    lines = (line.removeprefix("export ") for line in shown.splitlines() if "export" in line)
    return dict(line.split("=", 1) for line in lines)


# -- the whole of it, once --------------------------------------------------------------------


def test_up_stays_for_clients_of_both_apis_until_down(
    kept: GatewayFiles, monkeypatch: pytest.MonkeyPatch, runtime: Path, impostor: Path
) -> None:
    """A real proxy and engine, beside a program that would like to have their key."""
    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(runtime / "up"))
    port = free_port()
    command = [sys.executable, "-c", RUN, "up", "demo", "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    running = kept.running()
    assert running is not None
    # Else a proxy that is killed would leave the lock to its engine.
    assert not LINUX or holders(kept.lock) == {running.pid}
    variables = exported(done.stdout)
    assert variables["OPENAI_BASE_URL"] == f"http://127.0.0.1:{port}/v1"
    body = {
        "model": "demo",
        "max_tokens": 20,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    for url, key in (
        (variables["OPENAI_BASE_URL"] + "/chat/completions", variables["OPENAI_API_KEY"]),
        (variables["ANTHROPIC_BASE_URL"] + "/v1/messages", variables["ANTHROPIC_AUTH_TOKEN"]),
    ):
        header = {"authorization": f"Bearer {key}"}
        reply = httpx.post(url, json=body, headers=header, timeout=60, trust_env=False)
        assert "Paris" in reply.raise_for_status().text
    assert not impostor.exists()
    assert {mode(each) for each in kept.folder.iterdir()} == {0o600}
    assert key.encode() not in (kept.folder / "config.yaml").read_bytes()
    code, _, told = run("down")
    assert code == 0, told
    assert "engine  process" in told
    assert kept.running() is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(variables["ANTHROPIC_BASE_URL"], trust_env=False)
    assert not is_held(runtime / "up" / "engine.lock")


# -- the commands, with a stand-in for the proxy ------------------------------------------------


def test_a_second_up_reports_the_running_gateway(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles, tmp_path: Path
) -> None:
    port = stand_in_proxy()
    code, shown, told = run("up", "demo", "--port", str(port))
    assert code == 0, told
    assert f"# model demo, context {SERVED.context:,}" in shown
    pid = holder(kept.lock)
    for again in (["up"], ["up", "demo"], ["up", "mlx/demo", "--port", str(port)]):
        code, same, told = run(*again)
        assert (code, same) == (0, shown)
        assert f"runs    process {pid}, demo" in told
    for other in (["up", "demo-hybrid"], ["up", "--port", "1"], ["up", "--context", "300"]):
        code, nothing, told = run(*other)
        assert (code, nothing) == (1, "")
        assert f"already serves demo (context {SERVED.context:,})" in told
        assert "mlx-provider down" in told
    assert holder(kept.lock) == pid
    code, _, told = run("down")
    assert code == 0
    assert f"process {pid} has ended" in told
    assert not is_held(kept.lock)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.chmod(0o644)])
def test_up_refuses_to_print_a_key_that_the_running_gateway_does_not_know(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles, change: Callable[[Path], None]
) -> None:
    _, old, _ = run("up", "demo", "--port", str(stand_in_proxy()))
    change(kept.key_file)
    code, shown, told = run("up")
    assert (code, shown) == (1, "")
    assert "`mlx-provider down`, then `mlx-provider up`" in told
    run("down")
    code, new, told = run("up")
    assert code == 0, told
    assert exported(new).keys() == exported(old).keys()
    assert exported(new)["OPENAI_API_KEY"] != exported(old)["OPENAI_API_KEY"]


def test_down_without_a_gateway_reports_that_none_runs(kept: GatewayFiles) -> None:
    code, shown, told = run("down")
    assert (code, shown) == (0, "")
    assert "none runs" in told


def test_bare_mlx_provider_shows_what_up_serves(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles
) -> None:
    assert "gateway does not run" in run()[1]
    port = stand_in_proxy()
    run("up", "demo", "--port", str(port))
    context = f"{SERVED.context:,}"
    assert f"gateway serves demo (context {context}) at http://127.0.0.1:{port}" in run()[1]


def test_down_ends_the_engine_of_an_up_that_was_interrupted(
    kept: GatewayFiles, monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    """A real engine, while it loads the model or has just loaded it."""
    monkeypatch.setenv("MLX_PROVIDER_RUNTIME_DIR", str(runtime / "cut"))
    command = [sys.executable, "-c", RUN, "up", "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        while not (runtime / "cut" / "engine.sock").exists():
            assert process.poll() is None
            signal.sigtimedwait([], 0.05)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert kept.record() is None
    assert is_held(runtime / "cut" / "engine.lock")
    assert "engine  process" in run("down")[2]
    while is_held(runtime / "cut" / "engine.lock"):
        signal.sigtimedwait([], 0.05)


def test_down_ends_the_engine_of_a_proxy_that_was_killed(
    kept: GatewayFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlx_provider.gateway.engine.end_when", lambda *_, **__: "process 7 has ended"
    )
    kept.write(Record(SERVED, 4100))
    code, _, told = run("down")
    assert code == 0
    assert "none runs" in told
    assert "engine  process 7 has ended" in told


def test_up_starts_again_after_its_proxy_was_killed(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles
) -> None:
    run("up", "demo", "--port", str(stand_in_proxy()))
    running = kept.running()
    os.killpg(running.pid, signal.SIGKILL)
    while is_held(kept.lock):
        os.sched_yield()
    assert kept.running() is None
    code, shown, told = run("up")
    assert code == 0, told
    assert f":{running.record.port}/v1" in shown
    assert holder(kept.lock) != str(running.pid)


def test_down_ignores_the_process_id_of_an_earlier_gateway(kept: GatewayFiles) -> None:
    """The id may be another program's by now, which `down` must leave alone."""
    kept.write(Record(SERVED, 4100))
    kept.lock.write_text(f"{os.getpid()}\n")
    assert kept.running() is None
    code, _, told = run("down")
    assert (code, "none runs" in told) == (0, True)


def test_a_new_lock_does_not_keep_an_earlier_process_id(
    kept: GatewayFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.write(Record(SERVED, 4100))
    kept.lock.write_text("1\n")
    monkeypatch.setattr(persistent, "SIGN_LIMIT", 0.2)
    lock = kept.try_lock()
    assert lock is not None
    with pytest.raises(EngineUnavailable, match="lsof"):
        kept.running()
    lock.sign(17)
    assert kept.running() == Running(17, Record(SERVED, 4100))
    assert kept.try_lock() is None
    lock.release()
    assert kept.running() is None


def test_of_two_concurrent_ups_one_starts_and_the_other_reports_its_gateway(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other is where it has found nothing, and is about to start its own."""
    port = str(stand_in_proxy())
    command = ["up", "demo", "--port", port]
    first: list[tuple[int, str, str]] = []
    real = persistent.start

    def second(*arguments: object) -> bool:
        monkeypatch.setattr(persistent, "start", real)
        first.append(run(*command))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(persistent, "start", second)
    code, shown, told = run(*command)
    assert first[0][0] == code == 0, told
    assert first[0][1] == shown
    assert "runs    process" in told
    assert "runs    process" not in first[0][2]


def test_up_reports_a_port_in_use_and_keeps_its_record(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for last in (None, Record(SERVED, 4100)):
            kept.write(last)
            code, shown, told = run("up", "demo", "--port", str(port))
            assert (code, shown) == (1, "")
            assert f"port {port} on 127.0.0.1 is in use: choose another with --port" in told
            assert kept.running() is None
            assert kept.record() == last  # the next `up` does not try that port again


def test_up_reports_a_proxy_that_ended_with_its_exit_code(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "COMMAND", (sys.executable, "-c", "import sys; sys.exit('no way')"))
    code, _, told = run("up", "demo", "--port", str(stand_in_proxy()))
    assert code == 1
    assert "ended with exit code 1: no way" in told
    assert kept.running() is None


def test_sigterm_while_up_starts_ends_its_proxy(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_to_end(*arguments: object) -> None:
        assert kept.running() is not None
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Proxy, "generate_token", told_to_end)
    code, shown, _ = run("up", "demo", "--port", str(stand_in_proxy()))
    assert (code, shown) == (128 + signal.SIGTERM, "")
    assert kept.running() is None


def test_up_fails_if_the_proxy_refuses_its_first_request(kept: GatewayFiles) -> None:
    class Refusing(Handler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_error(503)

    asked: list[dict[str, object]] = []
    with serving(Refusing) as server:
        record = Record(SERVED, server.server_port)
        there = Proxy(None, record.url, "sk-x", kept.folder / "log")  # type: ignore[arg-type]
        with pytest.raises(EngineUnavailable, match="the proxy answers 503"):
            there.generate_token("demo", 60)
    assert asked[0]["max_tokens"] == 1


# -- the files -----------------------------------------------------------------------------------


def test_the_gateway_key_is_made_once_in_a_private_file(kept: GatewayFiles) -> None:
    key, new = kept.key()
    assert new
    assert key.startswith("sk-")
    assert mode(kept.key_file) == 0o600
    assert kept.key() == (key, False)


def test_a_gateway_key_readable_by_others_is_replaced(kept: GatewayFiles) -> None:
    key, _ = kept.key()
    kept.key_file.chmod(0o644)
    other, new = kept.key()
    assert (new, mode(kept.key_file)) == (True, 0o600)
    assert other != key
    kept.key_file.write_text("")  # a disk was full
    assert kept.key()[1]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_irregular_key_files_are_refused(kept: GatewayFiles, kind: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("sk-" + "x" * 40)
    victim.chmod(0o600)
    makers = {
        "link": lambda: kept.key_file.symlink_to(victim),
        "pipe": lambda: os.mkfifo(kept.key_file, 0o600),
        "folder": lambda: kept.key_file.mkdir(),
    }
    makers[kind]()
    with pytest.raises(EngineUnavailable, match=f"{kept.key_file} cannot be used .*: remove it"):
        kept.key()
    assert victim.read_text() == "sk-" + "x" * 40


def test_up_makes_its_folder_and_files_private(
    stand_in_proxy: Callable[[], int], kept: GatewayFiles, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for name in ("config.yaml", "record.json", "lock"):
        (kept.folder / name).write_text("")
        (kept.folder / name).chmod(0o666)
    kept.folder.chmod(0o777)
    (kept.folder / "proxy.log").symlink_to(outside)
    port = str(stand_in_proxy())
    code, _, told = run("up", "demo", "--port", port)
    assert code == 0, told
    assert outside.read_text() == "mine"
    assert mode(kept.folder) == 0o700
    assert {mode(each) for each in kept.folder.iterdir()} == {0o600}


def test_a_folder_that_is_a_link_is_refused(kept: GatewayFiles, tmp_path: Path) -> None:
    kept.folder.rmdir()
    kept.folder.symlink_to(tmp_path)
    with pytest.raises(EngineUnavailable, match="remove it"):
        kept.prepare()


@pytest.mark.parametrize("text", ["", "[]", '{"port": "x"}', "[" * 60_000, "\xff"])
def test_a_damaged_gateway_record_is_ignored(kept: GatewayFiles, text: str) -> None:
    (kept.folder / "record.json").write_bytes(text.encode("latin-1"))
    assert kept.record() is None
