"""A benchmark that a signal ends leaves no proxy, no engine and no server."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from mlx_provider.commands import Ended, long_command
from servers import held
from waiting import wait_until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are found by their environment"
)
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL = "--hidden 64 --layers 2 --peer none --format float32 --family llama --part answers"


def marked(mark: str) -> list[str]:
    """Command lines of the processes that have it in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_what_a_benchmark_started_ends_with_it() -> None:
    mark = f"OF_THIS_TEST={uuid4()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARKS), "compare", *SMALL.split()],
        env=os.environ | {name: value},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: any("gateway.proxy" in command for command in marked(mark)))
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    told = ""
    with process.stderr:
        for line in process.stderr:
            told += line
            if "ending the servers" in line:
                process.send_signal(signal.SIGINT)  # does not interrupt the clean-up
    process.wait()
    assert process.returncode == 128 + signal.SIGTERM, told
    assert "ending the servers that were started" in told
    assert "Traceback" not in told
    wait_until(lambda: marked(mark) == [])


def test_a_signal_waits_while_a_process_is_started() -> None:
    known = []

    def start() -> None:
        with held():
            signal.raise_signal(signal.SIGTERM)
            known.append("started")
        known.append("not reached")

    with pytest.raises(Ended) as ended, long_command(print):
        start()
    assert (ended.value.number, known) == (signal.SIGTERM, ["started"])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
