"""A command that takes minutes shows a sign of life, and one signal ends it."""

import os
import queue
import re
import signal
import subprocess
import sys

import pytest

from mlx_provider.commands import Ended, long_command
from mlx_provider.gateway.foreground import PASSED_ON
from mlx_provider.isolation import Isolation

LIMIT = 300
BENCH = """
from mlx_provider.cli import main
from mlx_provider import commands
commands.EVERY = 0.2
main()
"""
PART = ("bench", "prefix", "--model", "demo", "--part", "ttft")


def test_a_signal_passes_what_holds_back_errors() -> None:
    with pytest.raises(Ended), long_command(print), Isolation():
        signal.raise_signal(signal.SIGTERM)


def test_what_runs_is_reported_and_repeated() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with long_command(lines.put, every=0.01) as progress:
        progress.report("1 of 2: decoding")
        told = [lines.get(timeout=LIMIT)]
        while "... 1 of 2" not in told[-1]:
            told.append(lines.get(timeout=LIMIT))
    assert any(re.fullmatch(r" *\d+ s  1 of 2: decoding", line) for line in told)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in PASSED_ON]
    with long_command(print):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in PASSED_ON] == before


def test_a_benchmark_that_computes_ends() -> None:
    command = [sys.executable, "-c", BENCH, *PART]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if " of 3: demo, prompts of" in line and "... " in line:
                    break
            process.send_signal(signal.SIGTERM)
            told = process.communicate(timeout=LIMIT)[1]
            assert process.returncode == 128 + signal.SIGTERM, told
            assert "Traceback" not in told
        finally:
            process.kill()
