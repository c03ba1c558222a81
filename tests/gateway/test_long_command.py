"""A command that takes minutes shows a sign of life, and one signal ends it."""

import os
import signal
import subprocess
import sys

import pytest

from mlx_provider.commands import long_command
from mlx_provider.gateway.foreground import END_SIGNALS
from mlx_provider.isolation import Isolation

LIMIT = 300
RUN = "from mlx_provider.cli import main; main()"


def test_sigterm_is_not_caught_by_isolation() -> None:
    with pytest.raises(SystemExit) as ended, long_command(print), Isolation():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


def test_signal_handlers_are_restored_after_a_long_command() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by `nohup`
    before = [signal.getsignal(number) for number in END_SIGNALS]
    with long_command(print):
        changed = [number for number in END_SIGNALS if signal.getsignal(number) not in before]
        assert {*changed} == {*END_SIGNALS} - {signal.SIGHUP}
    assert [signal.getsignal(number) for number in END_SIGNALS] == before


def test_sigterm_ends_a_running_benchmark_without_traceback() -> None:
    command = [sys.executable, "-c", RUN, "bench", "prefix", "--model", "demo"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if " of 3: demo, prompts of" in line:
                    break
            process.send_signal(signal.SIGTERM)
            told = process.communicate(timeout=LIMIT)[1]
            assert process.returncode == 128 + signal.SIGTERM, told
            assert "Traceback" not in told
        finally:
            process.kill()
