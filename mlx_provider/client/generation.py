"""The interface of an engine, in this process or elsewhere, and the events of one reply. Their
reader, a thread or an event loop, reads the connection."""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

import h11
from pydantic import ValidationError

from ..errors import EngineDied, EngineUnavailable, MLXProviderError, RequestFailed
from ..protocol.event_queue import EventQueue, compacted, nothing_within, size
from ..protocol.events import Accepted, Done, Event, Failed
from ..protocol.health import Figures, Health
from ..protocol.requests import GenerateRequest, ModelRequest
from .stream_connection import PIECE, EventLines, StreamConnection

READ_AHEAD = 2**18
"""Bytes of unread events above which an event loop stops reading; the engine then joins waiting
events."""
EMPTY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ReplyEvents:
    """Read like `protocol.event_queue.EventQueue`: with `get`, or with `aget` in one event loop.

    `close` is safe from any thread. The reader closes the socket if there is one, else `close`
    does, so that a file descriptor that the system has reused is never read."""

    def __init__(self, stream: StreamConnection, lines: EventLines, first: list[Event]) -> None:
        self._stream = stream
        self._connection = stream.socket
        self._lines = lines
        self._events: list[Event] = []
        self._unread = 0
        self._lock = threading.RLock()
        """Reentrant: a garbage collection may close in any thread."""
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
        return self._ended

    def get(self, timeout: float | None = None) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._readable:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise nothing_within(timeout)
            self._wait(left)
        return self._take()

    async def aget(self, timeout: float | None = None) -> list[Event]:
        """Cancelling it loses no event."""
        if not self._readable:
            loop = asyncio.get_running_loop()
            self._watch(loop)
            await self._arrival(loop, timeout)
            if not self._readable:
                raise nothing_within(timeout)
        events = self._take()
        self._go_on()
        return events

    def close(self) -> None:
        """The engine ends the request. Idempotent, never blocks. Ignored in a forked child: the
        connection belongs to its parent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._reading and self._loop is None:
                self._connection.close()
                return
            self._stream.shut()  # its reader closes it
            loop = self._loop
        if loop is not None:
            self._leave(loop)

    def _wait(self, seconds: float | None) -> None:
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
        """Wait for data, at most `seconds`. With a timer, because `asyncio.timeout` takes as long
        as all other work for an event."""
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
        if self._loop is None:
            return
        try:
            self._feed(self._connection.recv(PIECE))
            while _buffered(self._connection) and not self._ended:
                self._feed(self._connection.recv(PIECE))
        except EMPTY:
            pass  # events read before are still delivered
        except OSError as error:
            self._lost(error)
        if self._ended:
            self._unwatch(self._loop)
        elif self._unread > READ_AHEAD:
            self._loop.remove_reader(self._connection.fileno())
            self._paused = True
        self._wake()

    def _go_on(self) -> None:
        if self._paused and self._loop is not None:
            self._paused = False
            self._loop.add_reader(self._connection.fileno(), self._arrived)
            if _buffered(self._connection):
                self._arrived()

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called before the socket is closed: the loop knows it by its file descriptor, which may
        be reused."""
        with self._lock:
            if self._loop is loop:
                loop.remove_reader(self._connection.fileno())
                self._loop = None
            self._closed = True
            self._connection.close()

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop watching, from any thread."""
        try:
            loop.call_soon_threadsafe(self._left, loop)
        except RuntimeError:  # the loop was closed and watches nothing
            self._connection.close()

    def _left(self, loop: asyncio.AbstractEventLoop) -> None:
        self._end(RequestFailed.cancelled())
        self._unwatch(loop)
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and self._readable:
            _settle(self._woken)

    @property
    def _readable(self) -> bool:
        return bool(self._events) or self._ended

    def _feed(self, data: bytes) -> None:
        """`data`: empty at the connection's end."""
        if not data:
            self._lost(None)
            return
        try:
            body, over = self._stream.received(data)
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
        """Ignored after the last event."""
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


def _buffered(connection: object) -> int:
    """Bytes that TLS has read; the event loop does not know of them."""
    return connection.pending() if isinstance(connection, ssl.SSLSocket) else 0


class Generation:
    """An accepted request. `get` blocks a thread, `aget` suspends a task; both return the events
    since the last call, and an empty list once `Done` or `Failed` was read. Deleting the object
    cancels the request."""

    def __init__(
        self, accepted: Accepted, events: EventQueue | ReplyEvents, cancel: Callable[[], None]
    ) -> None:
        self.accepted = accepted
        self._events = events
        self._finalizer = weakref.finalize(self, cancel)

    def get(self, timeout: float | None = None) -> list[Event]:
        """Raises `RequestTimedOut` after `timeout` seconds without events."""
        return self._events.get(timeout)

    async def aget(self, timeout: float | None = None) -> list[Event]:
        return await self._events.aget(timeout)

    def close(self) -> None:
        """Cancels the rest of the request. Idempotent, never blocks, safe from any thread."""
        if self._events.ended:
            self._finalizer.detach()
        self._finalizer()


class EngineClient(Protocol):
    def submit(self, request: ModelRequest) -> Generation:
        """Block until the request is accepted; loading a model may take minutes. Raises the
        engine's error (bad request, context too long, model not found, queue full ...) or
        `EngineUnavailable`."""

    def count(self, request: GenerateRequest) -> int:
        """Tokens of the prompt that `submit` would use; a lower limit if that exceeds the context.
        Blocks and raises like `submit`."""

    def health(self) -> Health:
        """Raises `EngineUnavailable`."""

    def figures(self) -> Figures:
        """Starts no engine. Raises `EngineUnavailable`."""

    def close(self) -> None:
        """Cancels running requests."""
