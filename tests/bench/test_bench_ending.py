"""A benchmark that a signal ends knows every process that it has started."""

import signal

import pytest

from mlx_provider.commands import long_command
from servers import held


def test_a_signal_is_delayed_until_a_process_is_started() -> None:
    known = []

    def start() -> None:
        with held():
            signal.raise_signal(signal.SIGTERM)
            known.append("started")
        known.append("not reached")

    with pytest.raises(SystemExit) as ended, long_command(print):
        start()
    assert (ended.value.code, known) == (128 + signal.SIGTERM, ["started"])
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
