"""One thread with one event loop that owns a client's connections."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..errors import EngineUnavailable

T = TypeVar("T")


class IOThread:
    """An event loop in a daemon thread; started with the object, ended by `stop`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_report)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop and wait for it, in a thread that is not the loop's own.

        An exception in the waiting thread (Ctrl-C) cancels the work.
        Raises `EngineUnavailable` when the client was closed meanwhile.
        """
        future = self.begin(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise client_closed() from None
        finally:
            future.cancel()

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` in the loop. Raises `EngineUnavailable` when the client was closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise client_closed() from None

    def soon(self, function: Callable[[], object]) -> None:
        """Have it called in the loop: any thread, never blocks, ignored after `stop`."""
        if os.getpid() != self._pid or self.loop.is_closed():
            return
        try:
            self.loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed between the two lines: all has ended
            return

    def stop(self) -> None:
        """Cancel what runs and end the thread. Idempotent."""
        if self.loop.is_closed():
            return
        try:
            self.loop.call_soon_threadsafe(self.loop.stop)
        except RuntimeError:  # another thread stopped it first
            return
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._cancel_all())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def client_closed() -> EngineUnavailable:
    """What a call that meets `close` ends with."""
    return EngineUnavailable("this client was closed")


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what the loop caught, but for wake-ups of a wait that was cancelled meanwhile.

    anyio 4.16 (`_backends/_asyncio.py`, `_RawSocketMixin`) has a unix socket's readiness call
    `Future.set_result` of the wait itself, which raises where a cancel came in the same turn of
    the loop. Nothing is lost by it: the bytes are still in the socket.
    """
    late = isinstance(context.get("exception"), asyncio.InvalidStateError)
    if not (late and "Future.set_result" in context["message"]):
        loop.default_exception_handler(context)
