"""Bombs in child processes, on systems that do not enforce the limit that a process sets itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_provider import bounded_process
from mlx_provider.bounded_process import BoundedProcesses

ECHO = "import time; make_answerer = lambda more: lambda said: time.sleep(0.3) or [said, more]"
BOMB = "import time; kept = bytearray(b'1') * (1 << 29); time.sleep(600)"


@pytest.fixture(autouse=True)
def not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_process, "ENFORCED", False)


def test_a_child_process_beyond_its_memory_limit_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", BOMB])
    with bounded_process.memory_limit(process, 1 << 28):
        code = process.wait(300)
    assert bounded_process.ENDS[-code] == "it takes too much memory"


def test_a_child_process_within_its_memory_limit_answers(tmp_path: Path) -> None:
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    assert json.loads(BoundedProcesses(program, 1 << 28, ["more"]).ask(b"3", {})) == [3, "more"]
