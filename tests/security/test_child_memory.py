"""Bombs in child processes, on systems that do not enforce the limit that a process sets itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_provider import bounded_process as memory_limit
from mlx_provider.bounded_process import BoundedProcesses, ProcessEnded

BOMB = "import time; kept = bytearray(b'1') * (1 << 29); time.sleep(20)"


@pytest.fixture(autouse=True)
def not_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "ENFORCED", False)


def test_a_process_beyond_its_memory_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "bomb.py"
    program.write_text(BOMB)
    with pytest.raises(ProcessEnded) as ended:
        BoundedProcesses(program, 1 << 28).ask(b"", {})
    assert ended.value.reason == "it takes too much memory"


def test_a_process_within_its_memory_answers(tmp_path: Path) -> None:
    program = tmp_path / "echo.py"
    program.write_text("import sys, time; time.sleep(0.3); print(9, sys.argv[1], sep='\\n')")
    assert BoundedProcesses(program, 1 << 28).ask(b"", {}) == b"268435456"
