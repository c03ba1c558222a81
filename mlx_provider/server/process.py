"""The HTTP server of one engine process, and when it ends. The calls for macOS follow Apple's
documentation: none of them has run on a Mac."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

import anyio
import anyio.to_thread
import uvicorn
from starlette.types import ASGIApp

from ..errors import EngineDied, EngineUnavailable
from ..protocol.event_queue import Put
from .app import EngineApp
from .connections import (
    BACKLOG,
    ConnectionLimits,
    Listener,
    WatchedProtocol,
    WatchedState,
    accepted_at_once,
    listen_tcp,
)

if TYPE_CHECKING:
    from ..serving.service import ChatService

CAFFEINATE = Path("/usr/bin/caffeinate")
PRESSURE = b"kern.memorystatus_vm_pressure_level"
NORMAL, CRITICAL = 1, 4  # levels of memory pressure
AGAIN_SECONDS = 10.0  # until the prefix cache shrinks again, if memory is still short
logger = logging.getLogger(__name__)
KEEP_ALIVE = 75  # seconds for an unused connection; our clients close theirs after 30
CLOSE_LIMIT = 2.0  # seconds until the server itself ends requests that the service has not ended
WRITE_LIMIT = 3  # seconds for clients to read the ends of their replies
WATCH = 0.5  # seconds between two checks whether to end
DRAIN_POLL = 0.05  # seconds between two checks whether the last request has ended
STOPPING = (signal.SIGTERM, signal.SIGINT)


class StayAwake:
    def __init__(self, program: Path = CAFFEINATE) -> None:
        self._program = program
        self.process: subprocess.Popen[bytes] | None = None

    def update(self, *, busy: bool) -> None:
        """Keep a Mac awake while `busy`, with the system's program. It also ends with this process
        (`-w`), and is started again if it has ended by itself."""
        running = self.process is not None and self.process.poll() is None
        if busy and not running and self._program.exists():
            command = [os.fspath(self._program), "-i", "-w", str(os.getpid())]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        elif not busy and self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None


class MemoryPressure:
    def __init__(self) -> None:
        self._next = 0.0

    def share_to_keep(self, level: int, now: float) -> float | None:
        """Share of the prefix cache to keep, so that other programs get memory; `None`: all of it.
        `now`: seconds on any clock."""
        if level <= NORMAL:
            self._next = 0.0
        elif now >= self._next:
            self._next = now + AGAIN_SECONDS
            return 0.0 if level >= CRITICAL else 0.5
        return None


def pressure_level() -> int:
    """Level of memory pressure on macOS; `NORMAL` on other systems."""
    if sys.platform != "darwin":
        return NORMAL
    found = ctypes.c_int(NORMAL)
    size = ctypes.c_size_t(ctypes.sizeof(found))
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(PRESSURE, ctypes.byref(found), ctypes.byref(size), None, 0)
    return NORMAL if failed else found.value


@dataclass(frozen=True)
class LoopDelivery:
    """A `Deliver` that runs the puts of one engine step in one call of the event loop."""

    _loop: asyncio.AbstractEventLoop

    def __call__(self, put: Put) -> None:
        try:
            self._loop.call_soon_threadsafe(put)
        except RuntimeError:  # the loop has ended, so nobody reads or waits
            put()


class EngineServer(uvicorn.Server):
    """A uvicorn server that ends requests in flight with an `MLXProviderError`."""

    def __init__(
        self,
        app: EngineApp,
        service: ChatService,
        listener: Listener,
        ready: Callable[[], None],
        limits: ConnectionLimits | None = None,
        drain: float = 0.0,
    ) -> None:
        """`ready`: called when clients can connect. `drain`: seconds for requests after a stop."""
        super().__init__(_config_of(app.asgi))
        self.server_state: WatchedState = WatchedState(limits or ConnectionLimits())
        self.app = app
        self._service = service
        self.listener = listener
        self._ready = ready
        self._drain = drain
        self._hurry = False
        self._died = False
        app.handover.stop = self.stop
        app.listener.listen = self._listen  # for `POST /v1/listener`

    async def run_until_stopped(self, idle_limit: float | None) -> None:
        """Serve until a signal, a `Handover`, `idle_limit` seconds without clients, or the loss of
        the socket file. Raises `EngineDied` after the death of the engine thread."""
        loop = asyncio.get_running_loop()
        watches = [loop.create_task(w) for w in (self._watch(idle_limit), self._watch_clients())]
        try:
            await self.serve(sockets=[self.listener.socket])
        finally:
            for watch in watches:
                watch.cancel()
        if self._died:
            raise EngineDied("the engine thread has died")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        # asyncio has set the queue of connections to the small number that it accepts in one turn
        self.listener.socket.listen(BACKLOG)
        self._ready()

    @asynccontextmanager
    async def _listen(self, app: ASGIApp) -> AsyncIterator[str]:
        """Serve `app` on a free loopback port during the block, within the same limits. Gives the
        URL. The end closes its connections, too."""
        config, made = _config_of(app), WeakSet[WatchedProtocol]()
        config.load()

        def connection() -> WatchedProtocol:
            protocol = WatchedProtocol(config, self.server_state, app_state={})
            made.add(protocol)
            return protocol

        listener = listen_tcp("127.0.0.1", 0)
        server = await asyncio.get_running_loop().create_server(connection, sock=listener.socket)
        try:
            yield listener.address
        finally:
            server.close()
            for protocol in made:
                if protocol.transport is not None:
                    protocol.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, end open ones with a typed error, write replies, close."""
        self.listener.remove()
        for server in self.servers:
            server.close()
        for _ in range(round(self._drain / DRAIN_POLL)):
            if self.app.activity.requests and not self._hurry:
                await asyncio.sleep(DRAIN_POLL)
        self.app.stop()
        with anyio.move_on_after(CLOSE_LIMIT):
            await anyio.to_thread.run_sync(self._service.close, abandon_on_cancel=True)
        await asyncio.sleep(0)  # deliver what `close` posted from its own thread first
        stopped = EngineUnavailable("the engine was stopped while it held this request")
        self.app.activity.fail_open(stopped)
        # Disconnect slow clients before uvicorn cancels their requests: it (0.33 to 0.54,
        # `run_asgi`) would log a traceback for each.
        last = asyncio.get_running_loop().call_later(WRITE_LIMIT, self.server_state.drop_all)
        await super().shutdown(sockets)
        last.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals call `stop`. `loop.add_signal_handler` loses one if the loop's pipe is full."""
        before = {number: signal.signal(number, self.stop) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, *signalled: object) -> None:
        """Takes effect in the next turn of uvicorn's loop. New requests are refused from now on."""
        self.app.handover.ending = True
        self.listener.remove()  # new clients now wait for the next engine
        self._hurry = self.should_exit  # a second stop does not wait for requests
        self.should_exit = True
        self._died = self._died and not signalled  # who sends a signal wants no new engine

    async def _watch_clients(self) -> None:
        tick = self.server_state.limits.tick
        while True:
            await asyncio.sleep(tick)
            self.server_state.tick(tick)
            self.app.activity.relieve()

    async def _watch(self, idle_limit: float | None) -> None:
        activity, awake, pressure = self.app.activity, StayAwake(), MemoryPressure()
        while True:
            await asyncio.sleep(WATCH if idle_limit is None else min(WATCH, idle_limit / 4))
            if self.should_exit:
                return
            awake.update(busy=bool(activity.requests))
            share = pressure.share_to_keep(pressure_level(), time.monotonic())
            if share is not None:
                logger.warning("memory is short: the prefix cache keeps %d %%", 100 * share)
                self._service.prefixes.keep_share(share)
            if idle_limit is not None and activity.idle() > idle_limit:
                logger.info("no client for %g s: the engine ends", idle_limit)
                self.stop()
            elif self.app.handover.due():
                self.stop()
            elif not (self._died or self._service.alive):
                self._died = True
                self.stop()
            elif not self.listener.findable() and not activity.requests:
                logger.warning("%s is gone: the engine ends", self.listener.path)
                self.stop()


def _config_of(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
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
