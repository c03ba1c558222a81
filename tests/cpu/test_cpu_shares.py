"""Work shared among the cores."""

import os
import sys
import threading

import pytest

from mlx_provider_cpu import attention

linux = pytest.mark.skipif(
    sys.platform != "linux" or attention.core_count() < 2, reason="threads cannot be kept apart"
)


def test_every_share_runs_once_and_the_first_in_the_calling_thread() -> None:
    done: dict[int, str] = {}

    def work(share: int) -> None:
        done[share] = threading.current_thread().name

    attention.on_cores(work, range(7))
    assert sorted(done) == list(range(7))
    assert done[0] == threading.current_thread().name
    assert all(done[share] != done[0] for share in range(1, 7))


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_of_any_share_is_raised(bad: int) -> None:
    def work(share: int) -> None:
        if share == bad:
            raise ValueError(share)

    with pytest.raises(ValueError, match=str(bad)):
        attention.on_cores(work, range(3))
    attention.on_cores(lambda share: None, range(3))


@linux
def test_workers_avoid_the_core_of_the_waiting_thread() -> None:
    before = os.sched_getaffinity(0)
    attention.on_cores(lambda share: None, range(2))  # the threads are there
    off: list[set[int]] = []

    def work(share: int) -> None:
        if share:
            off.append(before - os.sched_getaffinity(0))

    try:
        for core in (min(before), max(before)):
            os.sched_setaffinity(0, {core})
            attention.on_cores(work, range(2))
            assert off.pop() == {core}
            assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, before)


@linux
def test_shares_run_although_the_system_refuses_core_affinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("not here")

    done: list[int] = []
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    for _ in range(2):
        attention.on_cores(done.append, range(3))
    assert sorted(done) == [0, 0, 1, 1, 2, 2]
