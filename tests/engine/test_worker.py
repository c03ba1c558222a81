"""The engine thread: calls, and its death."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_provider.engine.worker import EngineWorker
from mlx_provider.errors import BadRequest, EngineDied
from mlx_provider.upstream.runtime import use_batch_policy


class Catastrophe(BaseException):
    """An error that no request can cause."""


def new_worker() -> tuple[EngineWorker, list[EngineDied]]:
    deaths: list[EngineDied] = []

    def deliver(posts: list[object]) -> None:
        for request, events in posts:  # type: ignore[misc]
            request.events.put(events)

    return EngineWorker(deliver, deaths.append), deaths  # type: ignore[arg-type]


def test_calls_run_on_one_separate_thread() -> None:
    worker, _ = new_worker()
    names = {worker.call(lambda: threading.current_thread().name).result() for _ in range(5)}
    worker.close()
    assert names == {"mlx-engine"}
    assert not worker.alive


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_the_engine_thread_and_mlx_threads_use_the_batch_policy() -> None:
    def tasks() -> set[int]:
        return {int(each.name) for each in Path("/proc/self/task").iterdir()}

    def policies() -> list[int]:
        before = tasks()
        mx.eval(mx.zeros(1) + 1)  # starts MLX's thread for the stream of this thread
        return [os.sched_getscheduler(each) for each in (0, *tasks() - before)]

    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # tests have the other policy
    worker, _ = new_worker()
    found = worker.call(policies).result()
    worker.close()
    assert len(found) > 1
    assert set(found) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    use_batch_policy()


@pytest.mark.parametrize("error", [Catastrophe(), BadRequest("no")])
def test_the_caller_gets_any_error_of_its_call(error: BaseException) -> None:
    worker, deaths = new_worker()

    def die() -> None:
        raise error

    with pytest.raises(type(error)):
        worker.call(die).result(timeout=300)
    assert worker.call(lambda: 2).result(timeout=300) == 2
    worker.close()
    assert deaths == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_and_later_callers_get_an_error_when_the_thread_dies() -> None:
    others = set(threading.enumerate())
    worker, deaths = new_worker()
    blocked, go = threading.Event(), threading.Event()

    class Dying:
        idle, scheduler = False, SimpleNamespace(busy=False)

        def step(self) -> None:
            blocked.set()
            go.wait()
            raise Catastrophe

    worker.call(lambda: worker.add(Dying())).result(timeout=300)  # type: ignore[arg-type]
    assert blocked.wait(300)
    waiting = worker.call(lambda: 1)
    go.set()
    with pytest.raises(EngineDied):
        waiting.result(timeout=300)
    for thread in set(threading.enumerate()) - others:
        thread.join(300)
    with pytest.raises(EngineDied):
        worker.call(lambda: 2)
    assert (len(deaths), worker.alive) == (1, False)
    worker.close()


def test_no_call_is_accepted_after_close() -> None:
    worker, _ = new_worker()
    worker.close()
    with pytest.raises(EngineDied):
        worker.call(lambda: 1)
