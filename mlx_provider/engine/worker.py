"""The engine thread, the only one that uses mx arrays. It runs calls of other threads, and between
these it steps every engine that has work. If it dies, the engine process ends."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import EngineDied, MLXProviderError, for_another
from ..isolation import background, resolve
from ..upstream.runtime import use_batch_policy
from .engine import Engine
from .step_output import Post

log = logging.getLogger(__name__)

T = TypeVar("T")
DIED = "the engine thread has died: another engine process takes the place of this one"
MOST_IDLE_CALLS = 8  # calls that wait for idle engines. A further one replaces the oldest
CLEAR_EVERY = 512  # steps after which MLX's free buffers go back to the system


class EngineWorker:
    def __init__(
        self, deliver: Callable[[list[Post]], None], died: Callable[[MLXProviderError], None]
    ) -> None:
        """On the engine thread, `deliver` gets the events of each step, and `died` the error with
        which the thread ends, unless `close` ends it."""
        self._deliver = deliver
        self._died = died
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._engines: list[Engine] = []
        self._idle_calls: deque[Callable[[], object]] = deque(maxlen=MOST_IDLE_CALLS)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed: EngineDied | None = None

    # -- from any thread

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between steps of the engine thread. Raises `EngineDied` once that ends."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed is not None:
                raise for_another(self._closed)
            self._calls.put((future, function))
            if self._thread is None:
                self._start()
        return future

    @property
    def alive(self) -> bool:
        """Whether `call` is possible."""
        return self._closed is None

    def close(self) -> None:
        """Stops the thread after the current step."""
        with self._lock:
            self._closed = self._closed or EngineDied("the engine is shutting down")
            thread = self._thread
            self._calls.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="mlx-engine", daemon=True)
        self._thread.start()

    # -- on the engine thread

    def add(self, engine: Engine) -> None:
        engine.deliver = self._deliver
        self._engines.append(engine)

    def remove(self, engine: Engine) -> None:
        self._engines.remove(engine)

    def when_idle(self, function: Callable[[], object]) -> None:
        """Run `function` once no engine has work. It is dropped if many later calls wait, too."""
        self._idle_calls.append(function)

    def end_background(self) -> None:
        for engine in self._engines:
            engine.end_background()

    def steps(self, engine: Engine) -> bool:
        """Whether this engine was added, and not removed."""
        return engine in self._engines

    def _run(self) -> None:
        clean = False
        use_batch_policy()
        try:
            self._loop()
            clean = True
        finally:
            self._engines = []
            self._idle_calls.clear()
            if not clean:
                self._bury(EngineDied(DIED))
            mx.synchronize()
            # without this, a compiled function that first ran in this thread aborts the exit
            # (mlx 0.32.4, seen in 28 of 120 runs)
            mx.clear_streams()

    def _loop(self) -> None:
        steps = 0
        while self._drain(self._rest()):
            self._step()
            if self._idle_calls and all(engine.idle for engine in self._engines):
                with background("a call to the idle engine thread"):
                    self._idle_calls.popleft()()
            steps += 1
            if steps % CLEAR_EVERY == 0:
                mx.clear_cache()

    def _rest(self) -> float:
        rest = min((engine.rest for engine in self._engines), default=inf)
        return 0.0 if self._idle_calls and rest == inf else rest

    def _step(self) -> None:
        """Step every engine. A step may remove an idle one; no reference to it remains here."""
        at = 0
        while at < len(self._engines):
            if not self._engines[at].idle and (posts := self._engines[at].step()):
                self._deliver(posts)
            at += 1

    def _drain(self, rest: float) -> bool:
        """Wait up to `rest` seconds for a call, then run all calls that wait. Returns whether to go
        on. Ends background prefills once a call has brought a request to any engine."""
        while True:
            try:
                item = self._calls.get(rest > 0, None if rest == inf else rest)
            except queue.Empty:
                return True
            if item is None:
                return False
            rest = 0
            if item[0].set_running_or_notify_cancel():
                resolve(*item)
            if any(engine.scheduler.busy for engine in self._engines):
                self.end_background()

    def _bury(self, error: EngineDied) -> None:
        """Report the end of this thread to everyone who waits for it."""
        log.critical("the engine thread died: %s", error.message)
        with self._lock:
            self._closed = error
            waiting = []
            while not self._calls.empty():
                waiting.append(self._calls.get_nowait())
        for item in waiting:
            if item is not None:
                item[0].set_exception(error)
        self._died(error)
