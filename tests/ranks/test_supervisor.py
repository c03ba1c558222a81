"""The supervisor over scripted groups: what is tried again, and what is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mlx_provider.errors import BadRequest, ProcessLost
from mlx_provider_ranks import launching, supervisor
from mlx_provider_ranks.__main__ import main
from mlx_provider_ranks.launching import GroupOptions, launch_command
from mlx_provider_ranks.messages import RankFault, RanksDiffer
from mlx_provider_ranks.report import REPORT_PREFIX, Report
from mlx_provider_ranks.supervisor import Attempt, Supervisor

from .ended import is_gone

FAULT = RankFault(rank=1, host="mac-1", reason="no beat for 4 s", since=1e9)
LIMIT = 20.0


def group(*reports: Report, then: str = "") -> list[str]:
    """A command that reports, and does something more."""
    lines = b"".join(REPORT_PREFIX + each.model_dump_json().encode() + b"\n" for each in reports)
    return [
        sys.executable,
        "-S",
        "-c",
        f"import os\nos.write(1, {lines!r})\n{textwrap.dedent(then)}",
    ]


SERVING = Report(kind="serving", rank=0)
LOST = Report(kind="lost", rank=0, fault=FAULT)


def run(commands: list[list[str]], told: list[RankFault | None] | None = None) -> int:
    left = iter(commands)

    def next_command(fault: RankFault | None) -> list[str]:
        if told is not None:
            told.append(fault)
        return next(left)

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        return Supervisor(next_command, back_off=(0.0,)).run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_group_that_served_restarts_and_is_told_why(capfd: pytest.CaptureFixture[str]) -> None:
    """More often than one that never served may; what a restart cannot mend ends it."""
    refused = Report.of(0, RanksDiffer("ranks differ: mlx: 2 on rank 1 (b), 1 on rank 0 (a)"))
    told: list[RankFault | None] = []
    commands = [group(SERVING, LOST, then="print('a line')"), *[group()] * 5, group(refused)]
    assert run(commands, told) == 1
    assert told == [None, *[FAULT] * 6]
    err = capfd.readouterr().err
    assert "rank 1 on mac-1 is lost: no beat for 4 s; the group restarts in 0 s" in err
    assert "a line" in err
    assert "its ranks ended without a word" in err
    assert err.endswith("mlx-provider: ranks differ: mlx: 2 on rank 1 (b), 1 on rank 0 (a)\n")


def test_one_that_never_served_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    failed = Report.of(1, ProcessLost("rank 1 did not come within 120 s"))
    assert failed.kind == "failed"
    assert run([group(failed)] * 5) == 1
    assert "5 starts have failed: rank 1 did not come within 120 s" in capfd.readouterr().err


def test_options_that_the_launcher_refuses_are_not_tried_again() -> None:
    assert run([group(then="os._exit(2)")]) == 1


def test_whoever_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also a child of the launcher that is stopped."""
    monkeypatch.setattr(supervisor, "LEAVE_LIMIT", 0.2)
    pid = tmp_path / "pid"
    line = REPORT_PREFIX + LOST.model_dump_json().encode() + b"\n"
    hangs = f"""
        import signal, time
        if os.fork() == 0:
            open({str(pid)!r}, "w").write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        while not (os.path.exists({str(pid)!r}) and open({str(pid)!r}).read()):
            time.sleep(0.01)
        os.write(1, {line!r})
        time.sleep({LIMIT})
    """
    assert run([group(then=hangs), group(then="os._exit(2)")]) == 1
    assert is_gone(int(pid.read_text()))


def test_a_leader_that_says_nothing_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its clients wait for it; one that says why has its time to tell them."""
    monkeypatch.setattr(supervisor, "LEADER_LIMIT", 0.3)
    monkeypatch.setattr(supervisor, "LEAVE_LIMIT", LIMIT)
    silent = RankFault(rank=0, host="a", reason="no beat for 3.5 s", since=1.0)
    noticed = Report(kind="lost", rank=1, fault=silent)
    done = tmp_path / "done"
    stays = "import signal\nsignal.pause()"
    leaves = f"import time\ntime.sleep(1)\nopen({str(done)!r}, 'w')"
    told: list[RankFault | None] = []
    groups = [group(noticed, then=stays), group(noticed, LOST, then=leaves)]
    run([*groups, group(then="os._exit(2)")], told)
    assert told == [None, silent, FAULT]
    assert done.exists()


SUPERVISED = """
import sys
from mlx_provider_ranks.supervisor import Supervisor
sys.exit(Supervisor(lambda fault: sys.argv[1:]).run())
"""


def test_a_signal_ends_the_group_by_its_input() -> None:
    """No signal reaches it: its ranks may be elsewhere."""
    waits = """
        import signal, sys
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(9))
        os.write(2, b"up\\n")
        assert next(line for line in sys.stdin if line.strip()) == "stop\\n"
        os.write(2, b"stopped in order\\n")
    """
    command = [sys.executable, "-c", SUPERVISED, *group(SERVING, then=waits)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == "stopped in order\n"
        assert process.wait(LIMIT) == 0


def test_the_leader_knows_best_why() -> None:
    attempt = Attempt()
    other = RankFault(rank=0, host="a", reason="the connection was closed", since=1.0)
    attempt.take(Report(kind="lost", rank=2, fault=other))
    attempt.take(Report(kind="lost", rank=0, fault=FAULT))
    attempt.take(Report(kind="lost", rank=1, fault=other))
    assert attempt.fault == FAULT


def test_a_line_of_something_else_is_no_report() -> None:
    assert Report.read(b"Loading weights") is None
    assert Report.read(REPORT_PREFIX + b"{") is None


def test_the_key_is_on_no_command_line() -> None:
    environ = {
        "MLX_PROVIDER_API_KEY": "secret",
        "MLX_PROVIDER_DISK_CACHE": "/mine",
        "MLX_PROVIDER_MAX_ROWS": "8",
        "MLX_RANK": "3",
        "HOME": "/home/me",
    }
    command = launch_command(GroupOptions(ranks=2), ["--port", "0"], FAULT, environ)
    assert _of_launch(command)[:6] == ["--hosts", "127.0.0.1", "-n", "2", "--backend", "ring"]
    assert int(command[command.index("--starting-port") + 1]) > 1024
    assert command[command.index("--env") + 1] == "MLX_PROVIDER_MAX_ROWS=8"
    assert command.count("--env") == 1
    assert not any("secret" in each for each in command)
    assert command[-2:] == ["--port", "0"]
    assert RankFault.model_validate_json(command[command.index("--last-fault") + 1]) == FAULT
    assert launching.child_environment(environ) == {
        name: value for name, value in environ.items() if name != "MLX_RANK"
    }


def _of_launch(command: list[str]) -> list[str]:
    """What `mlx.launch` is told."""
    launch = [sys.executable, "-P", "-m", "mlx_provider.upstream.launch"]
    assert command[: len(launch)] == launch
    return command[len(launch) :]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ('{"hosts": [{"ip": "x"}]}', "'ssh'"),
        ('[{"ssh": "a"}]', "two ranks at least"),
        ("3", "not iterable"),
    ],
)
def test_a_hostfile_that_cannot_be_read(tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "hosts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadRequest, match=told):
        GroupOptions(hostfile=file).check()


def test_a_hostfile_names_its_backend(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('{"backend": "jaccl", "hosts": [{"ssh": "a"}, {"ssh": "b"}]}')
    GroupOptions(hostfile=file).check()
    command = launch_command(GroupOptions(hostfile=file), [], None, {})
    assert _of_launch(command)[:4] == ["--hostfile", str(file), "--backend", "jaccl"]
    assert "--starting-port" not in command
    other = GroupOptions(hostfile=file, backend="ring", starting_port=9000)
    assert _of_launch(launch_command(other, [], None, {}))[2:6] == [
        "--backend", "ring", "--starting-port", "9000",
    ]  # fmt: skip


def test_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["--ranks", "2", "--port", "0"]) == 1
    assert "mlx.launch is missing" in capsys.readouterr().err
    assert main(["--ranks", "1"]) == 1
    assert "two at least" in capsys.readouterr().err
