"""Where one request's events wait for their reader, in any thread or event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable

from .errors import RequestTimedOut
from .protocol import Delta, Done, Event, Failed

COMPACT_ABOVE = 256
"""Waiting events above which neighbours are joined."""


class Mailbox:
    """An unbounded queue whose content is bounded by the reply itself.

    Deltas of the same choice that wait together are joined, so that a slow reader costs no
    more memory than the text it has not read yet. `put` is safe from any thread; one reader,
    either `get` (blocking) or `aget` (in an event loop).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._events: list[Event] = []
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._onward: Callable[[list[Event]], None] | None = None
        self._ended = False
        self._compact_above = COMPACT_ABOVE

    def put(self, events: Iterable[Event]) -> None:
        """Add the events of one step; events after the last one are dropped."""
        with self._lock:
            for event in events:
                if self._ended:
                    break
                self._append(event)
                self._ended = isinstance(event, Done | Failed)
            if self._onward is not None and self._events:
                self._onward(self._take())
            self._ready.notify_all()
            waiter = self._waiter
        if waiter is not None:
            loop, wake = waiter
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake.set)

    def pass_on(self, take: Callable[[list[Event]], None]) -> None:
        """Hand what waits and all that comes to `take`, in order; nobody reads here any more.

        `take` runs in the thread of `put` and must not block.
        """
        with self._lock:
            self._onward = take
            if self._events:
                take(self._take())

    @property
    def ended(self) -> bool:
        """Whether the last event has arrived (read or not)."""
        return self._ended

    def get(self, timeout: float | None = None) -> list[Event]:
        """Every waiting event, after waiting for at least one.

        Returns an empty list after the last event was read.
        Raises `RequestTimedOut` when `timeout` seconds pass without one.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._events and not self._ended:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise RequestTimedOut(f"no event within {timeout:g} s")
                self._ready.wait(left)
            return self._take()

    async def aget(self, timeout: float | None = None) -> list[Event]:
        """`get` for an event loop; cancelling it loses no event."""
        wake = asyncio.Event()
        with self._lock:
            if self._events or self._ended:
                return self._take()
            self._waiter = (asyncio.get_running_loop(), wake)
        try:
            # `wait_for` would swallow a cancellation that meets an arriving event (Python 3.11)
            async with asyncio.timeout(timeout):
                await wake.wait()
        except TimeoutError:
            raise RequestTimedOut(f"no event within {timeout:g} s") from None
        finally:
            with self._lock:
                self._waiter = None
        with self._lock:
            return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return compacted(events)

    def _append(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > self._compact_above:
            self._events = compacted(self._events)
            self._compact_above = 2 * len(self._events) + COMPACT_ABOVE


def compacted(events: list[Event]) -> list[Event]:
    """The same events with neighbouring deltas of one choice joined; order is kept."""
    out: list[Event] = []
    run: list[Delta] = []
    for event in events:
        if isinstance(event, Delta) and (not run or _follows(run[-1], event)):
            run.append(event)
            continue
        if run:
            out.append(_joined(run))
            run = []
        if isinstance(event, Delta):
            run.append(event)
        else:
            out.append(event)
    if run:
        out.append(_joined(run))
    return out


def _follows(first: Delta, second: Delta) -> bool:
    """Whether one delta can hold both: within a delta, reasoning precedes content and calls."""
    return first.index == second.index and _last_kind(first) <= _first_kind(second)


def _first_kind(delta: Delta) -> int:
    return 0 if delta.reasoning else 1 if delta.content else 2 if delta.tool_calls else 0


def _last_kind(delta: Delta) -> int:
    return 2 if delta.tool_calls else 1 if delta.content else 0


def _joined(run: list[Delta]) -> Delta:
    if len(run) == 1:
        return run[0]
    return Delta(
        index=run[0].index,
        content="".join(d.content for d in run),
        reasoning="".join(d.reasoning for d in run),
        tool_calls=[c for d in run for c in d.tool_calls],
        logprobs=[p for d in run for p in d.logprobs],
    )
