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

from ..errors import EngineUnavailable
from ..serving.interface import Put, Service
from .app import EngineApp
from .connections import ConnectionLimits, WatchedProtocol, WatchedState, accepted_at_once
from .listen import BACKLOG, Listener
from .macos import MemoryPressure, StayAwake

logger = logging.getLogger(__name__)

KEEP_ALIVE = 75
"""Seconds an unused connection is kept: more than our clients' 30, who then close first."""
CLOSE_LIMIT = 2.0
"""Seconds for the service to end its requests before the server ends them itself."""
WRITE_LIMIT = 3
"""Seconds for open replies to be written out at the end."""
WATCH = 0.5
DRAIN_POLL = 0.05
STOPPING = (signal.SIGTERM, signal.SIGINT)


class LoopDelivery:
    """`Deliver`: a whole engine step crosses to the event loop in one call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, put: Put) -> None:
        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop has ended: nobody reads, but nobody waits for ever either
            put()


class EngineServer(uvicorn.Server):
    """uvicorn with an orderly end: requests in flight end in a typed error, not in a cut."""

    def __init__(
        self,
        app: EngineApp,
        service: Service,
        listener: Listener,
        ready: Callable[[], None],
        limits: ConnectionLimits | None = None,
        drain: float = 0.0,
    ) -> None:
        """`drain`: seconds that requests in flight may take to end once it is stopped."""
        super().__init__(
            uvicorn.Config(
                app.asgi,
                http=WatchedProtocol,
                loop="asyncio",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                backlog=accepted_at_once(),
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=WRITE_LIMIT + 1,
            )
        )
        self.server_state: WatchedState = WatchedState(limits or ConnectionLimits())
        self._app = app
        self._service = service
        self._listener = listener
        self._ready = ready
        self._drain = drain
        self._hurry = False
        app.handover.stop = self._stop

    async def run_until_stopped(self, idle_limit: float | None) -> None:
        """Serve until a signal, `idle_limit` seconds without clients, or a lost socket file."""
        loop = asyncio.get_running_loop()
        watches = [loop.create_task(w) for w in (self._watch(idle_limit), self._watch_clients())]
        try:
            await self.serve(sockets=[self._listener.socket])
        finally:
            for watch in watches:
                watch.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        await super().startup(sockets)
        # asyncio takes one number for both: how many may queue here, and how many it accepts
        # before anything else happens.
        self._listener.socket.listen(BACKLOG)
        self._ready()

    async def _drained(self) -> None:
        """Wait for the requests in flight: as long as was granted, until a second signal."""
        for _ in range(round(self._drain / DRAIN_POLL)):
            if not self._app.activity.requests or self._hurry or self._app.lost():
                return
            await asyncio.sleep(DRAIN_POLL)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, end the open ones with a typed error, write out, close."""
        self._listener.remove()
        for server in self.servers:
            server.close()
        await self._drained()
        if (lost := self._app.lost()) is not None:
            self._app.activity.fail_open(lost)
        self._app.stop()
        if lost is None:  # else its thread may wait for ever for what other ranks do not send
            with anyio.move_on_after(CLOSE_LIMIT):
                await anyio.to_thread.run_sync(self._service.close, abandon_on_cancel=True)
            await asyncio.sleep(0)  # what `close` posted from its own thread is delivered first
        stopped = EngineUnavailable("the engine was stopped while it held this request")
        self._app.activity.fail_open(stopped)
        # Who reads or writes too slowly is disconnected before uvicorn cancels its request, for
        # which it (0.33 to 0.54, `run_asgi`) would log a traceback each.
        last = asyncio.get_running_loop().call_later(WRITE_LIMIT, self.server_state.drop_all)
        await super().shutdown(sockets)
        last.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the server; uvicorn would raise them again at the end.

        Not by `loop.add_signal_handler`: it sends the signal through the pipe that wakes the loop,
        and one that meets a full pipe, while a busy loop has not read it, is lost.
        """
        before = {number: signal.signal(number, self._stop) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def give_up(self) -> None:
        """Nothing can be served any more: every request is told why, and the process ends."""
        if (lost := self._app.lost()) is not None:
            self._app.activity.fail_open(lost)
        self._stop()

    def _stop(self, *signalled: object) -> None:
        """Takes effect with the next turn of uvicorn's main loop; nothing is taken until then."""
        self._app.handover.ending = True
        self._listener.remove()  # who comes now waits for the next engine
        self._hurry = self.should_exit
        self.should_exit = True

    async def _watch_clients(self) -> None:
        """Nothing is held for clients that bring nothing or take nothing."""
        tick = self.server_state.limits.tick
        while True:
            await asyncio.sleep(tick)
            self.server_state.tick(tick)
            self._app.activity.relieve()

    async def _watch(self, idle_limit: float | None) -> None:
        """An engine that nobody uses, or that nobody can find any more, ends."""
        activity, awake, pressure = self._app.activity, StayAwake(), MemoryPressure()
        while True:
            await asyncio.sleep(WATCH if idle_limit is None else min(WATCH, idle_limit / 4))
            if self.should_exit:
                return
            awake.update(busy=bool(activity.requests))
            if (share := pressure.share_to_keep()) is not None:
                logger.warning("memory is short: the prefix cache keeps %d %%", 100 * share)
                self._service.cache_shrink(share)
            if idle_limit is not None and activity.idle() > idle_limit:
                logger.info("no client for %g s: the engine ends", idle_limit)
                self._stop()
            elif self._app.handover.due():
                self._stop()
            elif not self._listener.findable() and not activity.requests:
                logger.warning("%s is gone: the engine ends", self._listener.path)
                self._stop()
