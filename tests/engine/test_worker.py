"""The engine thread: calls, death, replacement."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_provider.engine.worker import EngineWorker
from mlx_provider.errors import BadRequest, EngineDied
from mlx_provider.families.text import TextModel
from mlx_provider.testing.driver import new_engine, new_request, output_of
from references import alone


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
def test_neither_its_thread_nor_mlx_threads_preempt_the_thread_that_wakes_them() -> None:
    def tasks() -> set[int]:
        return {int(each.name) for each in Path("/proc/self/task").iterdir()}

    def policies() -> list[int]:
        before = tasks()
        mx.eval(mx.zeros(1) + 1)  # starts MLX's thread for the stream of this thread
        return [os.sched_getscheduler(each) for each in (0, *tasks() - before)]

    worker, _ = new_worker()
    found = worker.call(policies).result()
    worker.close()
    assert len(found) > 1
    assert set(found) == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_failed_call_affects_no_other() -> None:
    worker, deaths = new_worker()

    def bad() -> None:
        raise BadRequest("no")

    with pytest.raises(BadRequest):
        worker.call(bad).result()
    assert worker.call(lambda: 7).result() == 7
    worker.close()
    assert deaths == []


def test_the_caller_gets_any_error_of_its_call() -> None:
    worker, deaths = new_worker()

    def die() -> None:
        raise Catastrophe

    with pytest.raises(Catastrophe):
        worker.call(die).result(timeout=300)
    assert worker.call(lambda: 2).result(timeout=300) == 2
    worker.close()
    assert deaths == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_callers_get_an_error_when_the_thread_dies_and_it_is_replaced() -> None:
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
        thread.join(60)
    assert worker.call(lambda: 2).result(timeout=300) == 2
    assert len(deaths) == 1
    worker.close()


def test_a_request_runs_to_its_end(qwen3: TextModel) -> None:
    worker, _ = new_worker()
    request = new_request([40, 41, 42], max_tokens=6)

    def begin() -> None:
        engine = new_engine(qwen3)
        worker.add(engine)
        engine.submit(request)

    worker.call(begin).result()
    while not request.events.ended:
        request.events.get(timeout=300)
    worker.close()
    assert output_of(request).tokens == output_of(alone(qwen3, request)).tokens


def test_no_call_is_accepted_after_close() -> None:
    worker, _ = new_worker()
    worker.close()
    with pytest.raises(EngineDied):
        worker.call(lambda: 1)
