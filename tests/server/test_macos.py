"""A Mac stays awake while requests run, and gets memory back when it is short."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_provider.server import process
from mlx_provider.server.process import MemoryPressure, StayAwake, pressure_level


def test_one_caffeinate_process_runs_while_requests_run(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = tmp_path / "caffeinate"
    program.write_text(f'#!/bin/sh\necho "$@" >> {told}\nexec sleep 600\n')
    program.chmod(0o755)
    awake = StayAwake(program)
    awake.update(busy=False)
    assert awake.process is None
    awake.update(busy=True)
    first = awake.process
    assert first is not None
    while not told.exists() or not told.read_text():
        assert first.poll() is None
    awake.update(busy=True)
    assert awake.process is first
    first.kill()
    first.wait()
    awake.update(busy=False)
    assert awake.process is None
    awake.update(busy=True)
    second = awake.process
    second.kill()
    second.wait()
    awake.update(busy=True)
    third = awake.process
    assert third is not None
    assert third is not second
    awake.update(busy=False)
    assert third.returncode == -signal.SIGTERM
    assert {*told.read_text().splitlines()} == {f"-i -w {os.getpid()}"}


def test_without_caffeinate_nothing_is_started_and_nothing_raised(tmp_path: Path) -> None:
    (awake := StayAwake(tmp_path / "nothing")).update(busy=True)
    assert awake.process is None


def test_under_memory_pressure_a_share_of_the_cache_is_freed_at_intervals() -> None:
    levels, pressure = [1, 2, 2, 2, 4, 1, 4], MemoryPressure()
    kept = [pressure.share_to_keep(level, 6.0 * turn) for turn, level in enumerate(levels)]
    assert kept == [None, 0.5, None, 0.5, None, None, 0.0]


@pytest.mark.parametrize(("failed", "told"), [(0, 2), (-1, process.NORMAL)])
def test_the_memory_pressure_is_read_from_the_macos_kernel(
    failed: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `int sysctlbyname(name, old value, its size, new value, its size)`."""
    asked = []

    def sysctlbyname(name: bytes, old: Any, size: Any, new: None, length: int) -> int:
        (told, pressure) = (reference._obj for reference in (size, old))
        asked.append((name, told.value, new, length))
        pressure.value = 2
        return failed

    libc = SimpleNamespace(sysctlbyname=sysctlbyname)
    monkeypatch.setattr(process.sys, "platform", "darwin")
    monkeypatch.setattr(process.ctypes, "CDLL", {None: libc}.__getitem__)
    assert pressure_level() == told
    assert asked == [(b"kern.memorystatus_vm_pressure_level", 4, None, 0)]


@pytest.mark.skipif(process.sys.platform == "darwin", reason="macOS tells the level")
def test_other_systems_report_normal_memory_pressure() -> None:
    assert pressure_level() == process.NORMAL
