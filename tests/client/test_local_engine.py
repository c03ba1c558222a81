"""One engine per machine and user, started by whoever comes first."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.client.connection import LocalEngine
from mlx_provider.client.runtime_folder import EngineLock, check_folder, tail
from mlx_provider.config import Runtime
from mlx_provider.errors import BadRequest, EngineUnavailable, NotInstalled
from mlx_provider.protocol.events import Failed
from waiting import is_gone

RACER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from mlx_provider.client.messages import Address
from mlx_provider.client.http import HttpClient
from mlx_provider.client.connection import LocalEngine
from mlx_provider.config import Runtime
from mlx_provider.protocol.requests import GenerateRequest

here = Runtime(Path({folder!r}), dict(os.environ))
start = LocalEngine(here, (sys.executable, {script!r})).ensure
client = HttpClient(Address("http://engine", str(here.socket)), start=start)
sys.stdin.readline()
generation = client.submit(GenerateRequest(model="fake", prompt="count 2 0.1"))
while generation.get():
    pass
print(client.health().pid)
client.close()
"""


def test_racing_processes_start_one_engine(local: Any) -> None:
    tests = Path(__file__).parent
    program = RACER.format(
        tests=str(tests),
        folder=str(local.folder),
        script=str(tests.parent / "server" / "fake_engine.py"),
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for racer in racers:
        racer.stdin.write("\n")
        racer.stdin.flush()
    pids = {racer.communicate(timeout=300)[0].strip() for racer in racers}
    assert pids == {(local.folder / "engine.lock").read_text().strip()}
    assert (local.folder / "engine.log").read_text().count(" engine on ") == 1


def test_racing_threads_start_one_engine(local: Any, request_of: Any, read: Any) -> None:
    clients = [local.client() for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: read(clients[n % 4].submit(request_of("count 1 0"))), range(16)))
    assert len({client.health().pid for client in clients}) == 1
    assert (local.folder / "engine.log").read_text().count(" engine on ") == 1


def test_the_engine_outlives_the_client_that_started_it(
    local: Any, request_of: Any, read: Any
) -> None:
    first, second = local.client(), local.client()
    read(first.submit(request_of("count 1 0")))
    pid = first.health().pid
    first.close()
    read(second.submit(request_of("count 1 0")))
    assert second.health().pid == pid
    assert os.getsid(pid) == pid


def test_engine_folder_log_and_lock_are_private_to_the_user(local: Any, request_of: Any) -> None:
    local.client().submit(request_of("count 1 0"))
    for name in (".", "engine.log", "engine.lock", "engine.sock"):
        assert stat.S_IMODE((local.folder / name).lstat().st_mode) & 0o077 == 0, name


def test_a_stale_socket_starts_a_new_engine(local: Any, request_of: Any, read: Any) -> None:
    client = local.client()
    client.submit(request_of("count 1 0"))
    pid = client.health().pid
    client.close()
    os.kill(pid, signal.SIGKILL)
    assert read(local.client().submit(request_of("count 1 0")))
    assert (local.folder / "engine.log").read_text().count(" engine on ") == 2


def test_a_typed_start_error_keeps_its_class(local: Any, request_of: Any) -> None:
    with pytest.raises(NotInstalled, match="scripted trouble"):
        local.client(FAKE_START="code:not_installed").submit(request_of("x"))
    with pytest.raises(BadRequest, match="MLX_PROVIDER_MAX_ROWS"):
        local.client(MLX_PROVIDER_MAX_ROWS="many").submit(request_of("x"))


def test_a_crash_at_the_start_is_reported_with_the_last_log_line(
    local: Any, request_of: Any, read: Any
) -> None:
    with pytest.raises(EngineUnavailable, match="RuntimeError: scripted crash") as caught:
        local.client(FAKE_START="crash").submit(request_of("x"))
    assert "Traceback" not in caught.value.message
    assert str(local.folder / "engine.log") in caught.value.message
    assert read(local.client().submit(request_of("count 1 0")))


def test_a_start_that_hangs_is_ended(local: Any, request_of: Any, read: Any) -> None:
    with pytest.raises(EngineUnavailable, match="did not start within 2 s"):
        local.engine(start_limit=2, FAKE_START="hang").ensure()
    assert read(local.client().submit(request_of("count 1 0")))


def test_a_lock_holder_that_does_not_answer_is_named(local: Any) -> None:
    lock = EngineLock.try_take(local.folder / "engine.lock")
    lock.sign()
    with pytest.raises(EngineUnavailable, match=f"engine process {os.getpid()} does not answer"):
        local.engine(start_limit=0.2).ensure()
    (local.folder / "engine.lock").write_text("")
    lock.release()


@pytest.mark.parametrize(
    "environment", [{"FAKE_VERSION": "0.0.1"}, {"FAKE_PROTOCOL": "99", "FAKE_VERSION": "0.0.1"}]
)
def test_an_engine_of_another_version_is_refused(
    local: Any, request_of: Any, environment: dict[str, str]
) -> None:
    client = local.client(**environment)
    with pytest.raises(EngineUnavailable, match=r"mlx-provider 0\.0\.1") as caught:
        client.submit(request_of("x"))
    assert (local.folder / "engine.lock").read_text().strip() in caught.value.message


def test_an_engine_command_that_does_not_exist_is_an_error_with_its_reason(local: Any) -> None:
    engine = LocalEngine(local.runtime(), ("/nonexistent/python",))
    with pytest.raises(EngineUnavailable, match=r"started in .*No such file"):
        engine.ensure()


def test_a_folder_of_another_kind_is_refused(tmp_path: Path, local: Any) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "open", "link", "dangling"):
        with pytest.raises(EngineUnavailable, match="MLX_PROVIDER_RUNTIME_DIR"):
            check_folder(Runtime(tmp_path / name, {}), make=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused(local: Any) -> None:
    os.chown(local.folder, 12345, -1)
    with pytest.raises(EngineUnavailable, match="belongs to another user"):
        check_folder(local.runtime(), make=True)
    os.chown(local.folder, 0, -1)


def test_a_path_too_long_for_a_socket_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="MLX_PROVIDER_RUNTIME_DIR"):
        check_folder(Runtime(tmp_path / ("x" * 100), {}), make=True)


def test_a_removed_lock_file_does_not_block_a_new_lock(local: Any) -> None:
    path = local.folder / "engine.lock"
    first = EngineLock.try_take(path)
    assert first is not None
    assert EngineLock.try_take(path) is None
    path.unlink()
    second = EngineLock.try_take(path)
    assert second is not None
    for lock in (first, second):
        lock.release()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_that_was_ended_leaves_no_zombie(
    local: Any, request_of: Any, wait_until: Any, how: int
) -> None:
    client = local.client()
    waiting = client.submit(request_of("wait"))
    pid = client.health().pid
    os.kill(pid, how)
    assert isinstance(waiting.get(300)[-1], Failed)
    wait_until(lambda: is_gone(pid))


NOISY = """
import os, sys, time
from pathlib import Path
from mlx_provider.client import runtime_folder as lifecycle
path = Path(sys.argv[1])
lifecycle.LARGEST_LOG, lifecycle.LOG_POLL = 1000, 0.01
lifecycle.limit_log(path)

for number in range(400):
    print(f"line {number:95}", flush=True, file=sys.stdout if number % 2 else sys.stderr)
    while os.fstat(2).st_size > 1000:
        time.sleep(0.001)
"""


def test_the_log_of_a_background_process_is_limited(tmp_path):
    path = tmp_path / "engine.log"
    with path.open("ab") as log:
        subprocess.run([sys.executable, "-c", NOISY, path], stdout=log, stderr=log, check=True)
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["engine.log", "engine.log.1"]
    assert max(each.stat().st_size for each in files) < 1400
    lines = "".join(each.read_text() for each in reversed(files)).split()[1::2]
    assert lines == [str(number) for number in range(400 - len(lines), 400)]
    assert path.stat().st_mode & 0o077 == 0
    assert "line" in tail(files[1], begin=10**6), "the log was begun anew since"
