"""Where one request's events wait for their reader, in any thread or event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable

from ..errors import RequestFailed, RequestTimedOut
from .messages import Delta, Done, ErrorBody, Event, Failed, Finish, ToolCallDelta

COMPACT_ABOVE = 2**17
"""Bytes of waiting events above which those of one choice are joined."""
UNREAD_LIMIT = 2**25
"""Bytes of joined events above which a reader is too slow; a mailbox never holds twice as many."""
TAKEN = 2**20
"""Bytes of events after which one call of `get` returns no more."""
JOINED = 2**18
"""Bytes above which nothing more is joined to an event."""
EVENT_BYTES = 750
"""What an event takes beside its text (measured: pydantic 2.12, CPython 3.11)."""
CALL_BYTES = 550
LOGPROB_BYTES = 800


class Mailbox:
    """A queue whose writer never waits and whose content is bounded.

    Deltas of the same choice that wait together are joined, so that a slow reader costs no
    more memory than the text it has not read yet. Log-probabilities cannot be joined: a reader
    that leaves more than `UNREAD_LIMIT` unread loses it, and finds `Failed` in its place.
    `put` is safe from any thread; one reader, either `get` (blocking) or `aget` (in an event
    loop).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._events: list[Event] = []
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._onward: Callable[[list[Event]], None] | None = None
        self._ended = False
        self._unread = 0
        self._compact_above = COMPACT_ABOVE

    def put(self, events: Iterable[Event]) -> None:
        """Add the events of one step; events after the last one are dropped."""
        with self._lock:
            for event in events:
                if self._ended:
                    break
                self._append(event)
                self._ended = isinstance(self._events[-1], Done | Failed)
            self._forward()
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
            self._forward()

    @property
    def ended(self) -> bool:
        """Whether the last event has arrived (read or not)."""
        return self._ended

    @property
    def unread(self) -> int:
        """Bytes of the waiting events, about."""
        return self._unread

    def give_up(self) -> None:
        """Drop what waits; the reader finds an error instead. Nobody need be woken by this."""
        with self._lock:
            self._drop()

    def get(self, timeout: float | None = None) -> list[Event]:
        """Waiting events (some `TAKEN` bytes at once), after waiting for at least one.

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

    def _forward(self) -> None:
        while self._onward is not None and self._events:
            self._onward(self._take())

    def _take(self) -> list[Event]:
        events = compacted(self._events)
        taken, count = 0, 0
        while count < len(events) and taken < TAKEN:
            taken += size(events[count])
            count += 1
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
            "ask for fewer log-probabilities"
        )
        self._hold([Failed(error=ErrorBody.of(slow))])
        self._ended = True


def size(event: Event) -> int:
    """Bytes that an event takes in memory, about."""
    if not isinstance(event, Delta):
        return EVENT_BYTES
    calls = sum(CALL_BYTES + len(call.arguments) for call in event.tool_calls)
    named = sum(1 + len(entry.top) for entry in event.logprobs)
    return EVENT_BYTES + len(event.content) + len(event.reasoning) + calls + LOGPROB_BYTES * named


def compacted(events: list[Event]) -> list[Event]:
    """The same events with deltas of one choice joined; each choice keeps its order."""
    if len(events) < 2:
        return events
    runs: list[_Run | Event] = []
    growing: dict[int, _Run] = {}
    for event in events:
        if not isinstance(event, Delta):
            runs.append(event)
            _end_runs(growing, event)
            continue
        run = growing.get(event.index)
        if run is None or not run.takes(event):
            run = growing[event.index] = _Run()
            runs.append(run)
        run.add(event)
    return [run.joined() if isinstance(run, _Run) else run for run in runs]


def _end_runs(growing: dict[int, _Run], event: Event) -> None:
    """Nothing of a choice moves before its end, nor before an event that belongs to all."""
    if isinstance(event, Finish):
        growing.pop(event.index, None)
    else:
        growing.clear()


class _Run:
    """Deltas of one choice that one delta can hold."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.bytes = 0

    def takes(self, delta: Delta) -> bool:
        return self.bytes < JOINED and _last_kind(self.deltas[-1]) <= _first_kind(delta)

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.bytes += size(delta) - EVENT_BYTES

    def joined(self) -> Delta:
        if len(self.deltas) == 1:
            return self.deltas[0]
        return Delta(
            index=self.deltas[0].index,
            content="".join(d.content for d in self.deltas),
            reasoning="".join(d.reasoning for d in self.deltas),
            tool_calls=_joined_calls([c for d in self.deltas for c in d.tool_calls]),
            logprobs=[p for d in self.deltas for p in d.logprobs],
        )


def _joined_calls(pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Pieces of one call's arguments in one; a piece with a name begins another."""
    calls: list[list[ToolCallDelta]] = []
    for piece in pieces:
        begins = piece.id is not None or piece.name is not None
        if begins or not calls or calls[-1][0].index != piece.index:
            calls.append([])
        calls[-1].append(piece)
    return [
        call[0].model_copy(update={"arguments": "".join(piece.arguments for piece in call)})
        for call in calls
    ]


def _first_kind(delta: Delta) -> int:
    """Within a delta, reasoning precedes content and calls."""
    return 0 if delta.reasoning else 1 if delta.content else 2 if delta.tool_calls else 0


def _last_kind(delta: Delta) -> int:
    return 2 if delta.tool_calls else 1 if delta.content else 0
