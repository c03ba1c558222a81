"""The events of one reply, read from its connection by whoever wants them."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import h11
from pydantic import ValidationError

from ..errors import EngineDied, EngineUnavailable, MLXProviderError, RequestFailed
from ..protocol.compaction import compacted, size
from ..protocol.event_queue import nothing_within
from ..protocol.events import Done, Event, Failed
from .wire import EventLines

PIECE = 2**16
"""Bytes read from the socket at once."""
READ_AHEAD = 2**18
"""Bytes of events that wait for an event loop's reader, above which the rest stays with the
engine, which joins what waits there."""
EMPTY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a socket raises that has nothing yet."""

Decoded = Callable[[bytes], tuple[bytes, bool]]
"""Bytes of the connection -> what they say of the body, and whether that was its end."""
Begin = Callable[[Coroutine[Any, Any, None]], object]
"""Has work done in an event loop that outlives it."""


class ReplyEvents:
    """`protocol.event_queue.Events` of a connection that is its own.

    One reader, either `get` (blocking) or `aget` (in one event loop); `close` is safe from any
    thread. The socket is closed by its reader where there is one, by `close` otherwise: a number
    that the system gives to another file meanwhile is never read.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoded: Decoded,
        lines: EventLines,
        first: list[Event],
        begin: Begin,
    ) -> None:
        """`first`: the events that have come already."""
        self._connection = connection
        self._decoded = decoded
        self._lines = lines
        self._begin = begin
        self._events: list[Event] = []
        self._unread = 0
        self._lock = threading.RLock()
        """Of who reads, and who ends it: the collector of garbage may, in any thread."""
        self._reading = False
        self._closed = False
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paused = True
        self._woken: asyncio.Future[None] | None = None
        self._pid = os.getpid()
        self._hold(first)
        if self._ended:
            self.close()

    @property
    def ended(self) -> bool:
        """Whether the last event has arrived (read or not)."""
        return self._ended

    def get(self, timeout: float | None = None) -> list[Event]:
        """See `Events.get`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._readable:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise nothing_within(timeout)
            self._wait(left)
        return self._take()

    async def aget(self, timeout: float | None = None) -> list[Event]:
        """See `Events.aget`; cancelling it loses no event."""
        if not self._readable:
            loop = asyncio.get_running_loop()
            self._watch(loop)
            await self._arrival(loop, timeout)
            if not self._readable:
                raise nothing_within(timeout)
        events = self._take()
        self._go_on()
        return events

    def pass_on(self, take: Callable[[list[Event]], None]) -> None:
        """See `Events.pass_on`: in the thread of the client."""
        self._begin(self._pump(take))

    def close(self) -> None:
        """Let go of the reply, so that the engine ends the request. Idempotent, never blocks.

        Ignored in a forked child: the connection is its parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._reading and self._loop is None:
                self._connection.close()
                return
            shut(self._connection)  # whoever reads it closes it
            loop = self._loop
        if loop is not None:
            self._leave(loop)

    # -- a thread

    def _wait(self, seconds: float | None) -> None:
        """Read what comes within so many seconds."""
        with self._lock:
            if self._closed:
                self._end(RequestFailed.cancelled())
                return
            self._reading = True
        try:
            self._connection.settimeout(seconds)
            self._feed(self._connection.recv(PIECE))
        except TimeoutError:
            return
        except OSError as error:
            self._lost(error)
        finally:
            with self._lock:
                self._reading = False
                if self._closed or self._ended:
                    self._closed = True
                    self._connection.close()

    # -- an event loop (all in its thread)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._closed:
                self._end(RequestFailed.cancelled())
            if self._loop is loop or self._ended:
                return
            self._loop = loop
            self._connection.setblocking(False)
        self._go_on()

    async def _arrival(self, loop: asyncio.AbstractEventLoop, seconds: float | None) -> None:
        """Until there is something to read, so many seconds at most.

        By a timer: `asyncio.timeout` takes as long as all else that is done for an event.
        """
        if self._readable:
            return
        self._woken = woken = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _settle, woken)
        try:
            await woken
        finally:
            if timer is not None:
                timer.cancel()

    def _arrived(self) -> None:
        """The socket has something to say."""
        if self._loop is None:
            return
        try:
            self._feed(self._connection.recv(PIECE))
            while _buffered(self._connection) and not self._ended:
                self._feed(self._connection.recv(PIECE))
        except EMPTY:
            pass  # what was read before is told all the same
        except OSError as error:
            self._lost(error)
        if self._ended:
            self._unwatch(self._loop)
        elif self._unread > READ_AHEAD:
            self._loop.remove_reader(self._connection.fileno())
            self._paused = True
        self._wake()

    def _go_on(self) -> None:
        """Read on where the reader has caught up."""
        if self._paused and self._loop is not None:
            self._paused = False
            self._loop.add_reader(self._connection.fileno(), self._arrived)
            if _buffered(self._connection):
                self._arrived()

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Before the socket is closed: a loop knows it by a number that another may get."""
        with self._lock:
            if self._loop is loop:
                loop.remove_reader(self._connection.fileno())
                self._loop = None
            self._closed = True
            self._connection.close()

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the loop let go of it, from any thread."""
        try:
            loop.call_soon_threadsafe(self._left, loop)
        except RuntimeError:  # it was closed, and watches nothing any more
            self._connection.close()

    def _left(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end(RequestFailed.cancelled())
        self._unwatch(loop)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and self._readable:
            _settle(self._woken)

    async def _pump(self, take: Callable[[list[Event]], None]) -> None:
        try:
            while events := await self.aget():
                take(events)
        finally:
            if not self._ended:  # the client is closed
                self.close()
                take([Failed.of(RequestFailed.cancelled())])

    # -- what comes

    @property
    def _readable(self) -> bool:
        return bool(self._events) or self._ended

    def _feed(self, data: bytes) -> None:
        """Bytes of the connection; none: its end."""
        if not data:
            self._lost(None)
            return
        try:
            body, over = self._decoded(data)
            self._hold(self._lines.feed(body))
        except h11.RemoteProtocolError as error:
            self._lost(error)
        except ValidationError as error:
            self._end(EngineUnavailable(f"the engine's events cannot be read: {error}"))
        else:
            if over:
                self._lost(None)

    def _hold(self, events: list[Event]) -> None:
        for at, event in enumerate(events):
            self._unread += size(event)
            if isinstance(event, Done | Failed):
                self._events += events[: at + 1]
                self._ended = True
                return
        self._events += events

    def _lost(self, error: Exception | None) -> None:
        """The connection ended, or breaks; past the last event nobody minds."""
        if self._closed:
            self._end(RequestFailed.cancelled())
        elif error is None:
            self._end(EngineDied("the engine's reply ended before its last event"))
        else:
            self._end(EngineDied(f"the engine ended while it held this request: {error}"))

    def _end(self, error: MLXProviderError) -> None:
        if not self._ended:
            self._hold([Failed.of(error)])

    def _take(self) -> list[Event]:
        events, self._events, self._unread = compacted(self._events), [], 0
        return events


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def shut(connection: socket.socket) -> None:
    """End a connection that another thread reads. Not by TLS's own `shutdown`, after which that
    thread would read what is encrypted."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:  # the engine was first
        return


def _buffered(connection: socket.socket) -> int:
    """Bytes that TLS has read and nobody has taken, of which the system says nothing."""
    return connection.pending() if isinstance(connection, ssl.SSLSocket) else 0
