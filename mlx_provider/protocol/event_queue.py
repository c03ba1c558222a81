"""The queue between a writer of events and their reader, in any thread or event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable
from contextlib import nullcontext

from ..errors import RequestFailed, RequestTimedOut
from .compaction import compacted, size
from .events import Done, Event, Failed

COMPACT_ABOVE = 2**17
"""Bytes of waiting events above which those of one choice are joined."""
UNREAD_LIMIT = 2**25
"""Bytes of joined events above which a reader is too slow; a queue never holds twice as many."""
TAKEN = 2**20
"""Bytes of events after which one call of `get` returns no more."""


class EventQueue:
    """A bounded queue whose writer never waits.

    Waiting deltas of one choice are joined, so that a slow reader needs no
    more memory than its unread text. Log-probabilities cannot be joined: a reader
    with more than `UNREAD_LIMIT` unread bytes loses them and gets `Failed` instead.
    `put` is safe from any thread; one reader, either `get` (blocking) or `aget` (in an event
    loop).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._events: list[Event] = []
        self._reader: _Sleeper | None = None
        self._ended = False
        self._unread = 0
        self._compact_above = COMPACT_ABOVE

    @property
    def ended(self) -> bool:
        """Whether the last event has arrived (read or not)."""
        return self._ended

    @property
    def unread(self) -> int:
        """Approximate bytes of the waiting events."""
        return self._unread

    # -- writing

    def put(self, events: Iterable[Event]) -> None:
        """Add the events of one step; events after the last one are dropped."""
        with self._lock:
            for event in events:
                if self._ended:
                    break
                self._append(event)
                self._ended = isinstance(self._events[-1], Done | Failed)
            self._arrived.notify_all()
            reader = self._reader
        if reader is not None:
            reader.wake()

    def give_up(self) -> None:
        """Drop the waiting events; the reader gets an error instead. This wakes no reader."""
        with self._lock:
            self._drop()

    # -- reading

    def get(self, timeout: float | None = None) -> list[Event]:
        """Waits for at least one event. Returns the waiting events, up to about `TAKEN` bytes.

        Returns an empty list after the last event was read.
        Raises `RequestTimedOut` when `timeout` seconds pass without one.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._readable:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise nothing_within(timeout)
                self._arrived.wait(left)
            return self._take()

    async def aget(self, timeout: float | None = None) -> list[Event]:
        """`get` for an event loop. A cancellation loses no event."""
        with self._lock:
            if self._readable:
                return self._take()
            self._reader = reader = _Sleeper()
        try:
            # `wait_for` would lose a cancellation at the arrival of an event (Python 3.11)
            async with nullcontext() if timeout is None else asyncio.timeout(timeout):
                while not self._readable:
                    await reader.sleep()
        except TimeoutError:
            raise nothing_within(timeout) from None
        finally:
            self._reader = None
        with self._lock:
            return self._take()

    # -- waiting events (the caller holds the lock, except for the two properties)

    @property
    def _readable(self) -> bool:
        return bool(self._events) or self._ended

    def _take(self) -> list[Event]:
        events = compacted(self._events)
        count = len(events) if self._unread <= TAKEN else _within(TAKEN, events)
        self._hold(events[count:])
        return events[:count]

    def _append(self, event: Event) -> None:
        self._events.append(event)
        self._unread += size(event)
        if self._unread > self._compact_above:
            self._hold(compacted(self._events))
            if self._unread > UNREAD_LIMIT:
                self._drop()

    def _hold(self, events: list[Event]) -> None:
        self._events = events
        self._unread = sum(map(size, events))
        self._compact_above = 2 * self._unread + COMPACT_ABOVE

    def _drop(self) -> None:
        slow = RequestFailed(
            f"its reader left {self._unread // 2**20} MiB of the reply unread: read faster, or "
            "ask for fewer log-probabilities, or fewer vectors at once"
        )
        self._hold([Failed.of(slow)])
        self._ended = True


class _Sleeper:
    """A task that sleeps in its event loop until it is woken, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._woken: asyncio.Future[None] | None = None

    async def sleep(self) -> None:
        """Sleep until the next `wake`. Call it in the loop iteration that has checked the
        condition."""
        self._woken = self._loop.create_future()
        await self._woken

    def wake(self) -> None:
        """Wake the task; in the loop's own thread without a system call. Ignored if the loop has
        ended."""
        try:
            if threading.get_ident() == self._thread:
                self._wake()
            else:
                self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop is closed, so no task sleeps in it
            return

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)


def _within(limit: int, events: list[Event]) -> int:
    """Number of first events with at least `limit` bytes in total, or all."""
    taken = count = 0
    while count < len(events) and taken < limit:
        taken += size(events[count])
        count += 1
    return count


def nothing_within(timeout: float | None) -> RequestTimedOut:
    """The error for a reader whose time limit has passed."""
    return RequestTimedOut(f"no event within {timeout:g} s")
