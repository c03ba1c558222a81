"""One engine process from its first request to its last."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import uvicorn

from ..chat.interface import Post, Service, deliver_now
from ..errors import EngineUnavailable
from ..protocol import ErrorBody
from .app import EngineApp
from .listen import Listener

logger = logging.getLogger(__name__)

KEEP_ALIVE = 75
"""Seconds an unused connection is kept: more than our clients' 30, who then close first."""
CLOSE_LIMIT = 2.0
"""Seconds for the service to end its requests before the server ends them itself."""
WRITE_LIMIT = 3
"""Seconds for open replies to be written out at the end."""
WATCH = 0.5


class LoopDelivery:
    """`Deliver`: a whole engine step crosses to the event loop in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, posts: list[Post]) -> None:
        try:
            self._loop.call_soon_threadsafe(deliver_now, posts)
        except RuntimeError:  # the loop has ended: nobody reads, but nobody waits for ever either
            deliver_now(posts)


class EngineServer(uvicorn.Server):
    """uvicorn with an orderly end: requests in flight end in a typed error, not in a cut."""

    def __init__(
        self, app: EngineApp, service: Service, listener: Listener, ready: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app.asgi,
                loop="asyncio",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=WRITE_LIMIT,
            )
        )
        self._app = app
        self._service = service
        self._listener = listener
        self._ready = ready
        app.giving_way.stop = self._stop

    async def run_until_stopped(self, idle_limit: float | None) -> None:
        """Serve until a signal, `idle_limit` seconds without clients, or a lost socket file."""
        watch = asyncio.get_running_loop().create_task(self._watch(idle_limit))
        try:
            await self.serve(sockets=[self._listener.socket])
        finally:
            watch.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, end the open ones with a typed error, write out, close."""
        self._listener.remove()
        for server in self.servers:
            server.close()
        self._app.stop()
        with anyio.move_on_after(CLOSE_LIMIT):
            await anyio.to_thread.run_sync(self._service.close, abandon_on_cancel=True)
        await asyncio.sleep(0)  # what `close` posted from its own thread is delivered first
        stopped = EngineUnavailable("the engine was stopped while it held this request")
        self._app.activity.fail_open(ErrorBody.of(stopped))
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the server; uvicorn would raise them again at the end."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.should_exit = True

    async def _watch(self, idle_limit: float | None) -> None:
        """An engine that nobody uses, or that nobody can find any more, ends."""
        activity = self._app.activity
        while not self.should_exit:
            await asyncio.sleep(WATCH if idle_limit is None else min(WATCH, idle_limit / 4))
            if idle_limit is not None and activity.idle() > idle_limit:
                logger.info("no client for %g s: the engine ends", idle_limit)
                self._stop()
            elif self._app.giving_way.due():
                self._stop()
            elif not self._listener.findable() and not activity.requests:
                logger.warning("%s is gone: the engine ends", self._listener.path)
                self._stop()
