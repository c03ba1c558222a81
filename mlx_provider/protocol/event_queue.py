"""The queue of a request's events, and how deltas are joined if its reader is slow."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import RequestFailed, RequestTimedOut
from .events import Delta, Done, Embedded, Event, Failed, Finish, ToolCallDelta

Put = Callable[[], None]
"""Puts the events of one engine step into their requests' queues."""
Deliver = Callable[[Put], None]
"""Runs a `Put` where it wakes readers most cheaply. Never blocks."""
MAX_JOINED_BYTES = 2**18  # of a delta to which nothing more is joined
EVENT_BYTES = 750  # memory of an event beside its text (measured: pydantic 2.12, CPython 3.11)
CALL_BYTES = 550  # the same for a `ToolCallDelta`
LOGPROB_BYTES = 800  # and for a `TokenLogprob`
COMPACT_ABOVE = 2**17  # bytes of waiting events above which the deltas of a choice are joined
UNREAD_LIMIT = 2**25  # bytes of joined events above which the reader is too slow
GET_BYTES = 2**20  # after so many, one `get` returns no more events


class EventQueue:
    """A bounded queue. Any thread may `put`, and never waits. One reader uses `get` or `aget`.
    Waiting deltas of one choice are joined. If more than `UNREAD_LIMIT` bytes are unread, the
    reader loses all of them and gets `Failed`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._events: list[Event] = []
        self._reader: tuple[int, asyncio.Future[None]] | None = None
        """The thread of an `aget` that waits, and the future that wakes it there."""
        self.ended = False  # whether `Done` or `Failed` was put
        self.unread = 0  # bytes
        self._compact_above = COMPACT_ABOVE

    def put(self, events: Iterable[Event]) -> None:
        """Add events and wake the reader. Ignores all events after `Done` or `Failed`."""
        with self._lock:
            for event in events:
                if self.ended:
                    break
                self._append(event)
                self.ended = isinstance(self._events[-1], Done | Failed)
            self._arrived.notify_all()
            reader = self._reader if self._readable else None
            if reader is not None:  # it is woken once, however much comes before it runs
                self._reader = None
        if reader is not None:
            thread, woken = reader
            with suppress(RuntimeError):  # the loop is closed
                if threading.get_ident() == thread:
                    _settle(woken)  # without a system call
                else:
                    woken.get_loop().call_soon_threadsafe(_settle, woken)

    def give_up(self) -> None:
        """Replace all unread events by a `Failed` about the slow reader."""
        with self._lock:
            self._drop()

    def get(self, timeout: float | None = None) -> list[Event]:
        """Wait for events, and return up to about `GET_BYTES` of them; an empty list after the last
        one was read. Raises `RequestTimedOut` after `timeout` seconds without an event."""
        with self._lock:
            self._arrived.wait_for(lambda: self._readable, timeout)
            return self._take(timeout)

    async def aget(self, timeout: float | None = None) -> list[Event]:
        """Like `get`, in an event loop. A cancellation loses no event, nor is it lost to an event:
        `asyncio.wait_for` of Python 3.11 loses one, and `asyncio.timeout` takes too long."""
        with self._lock:
            if self._readable:
                return self._take(timeout)
            loop = asyncio.get_running_loop()
            woken = loop.create_future()
            self._reader = threading.get_ident(), woken
        timer = None if timeout is None else loop.call_later(timeout, _settle, woken)
        try:
            await woken
        finally:
            self._reader = None
            if timer is not None:
                timer.cancel()
        with self._lock:
            return self._take(timeout)

    # -- waiting events (the caller holds the lock)

    @property
    def _readable(self) -> bool:
        return bool(self._events) or self.ended

    def _take(self, timeout: float | None) -> list[Event]:
        if not self._readable:
            raise RequestTimedOut(f"no event within {timeout:g} s")
        events, count, nbytes = compact(self._events), 0, 0
        while count < len(events) and nbytes < GET_BYTES:
            nbytes += event_bytes(events[count])
            count += 1
        self._replace_events(events[count:])
        return events[:count]

    def _append(self, event: Event) -> None:
        self._events.append(event)
        self.unread += event_bytes(event)
        if self.unread > self._compact_above:
            self._replace_events(compact(self._events))
            if self.unread > UNREAD_LIMIT:
                self._drop()

    def _replace_events(self, events: list[Event]) -> None:
        self._events = events
        self.unread = sum(map(event_bytes, events))
        self._compact_above = 2 * self.unread + COMPACT_ABOVE

    def _drop(self) -> None:
        slow = f"its reader left {self.unread // 2**20} MiB of the reply unread"
        remedy = "read faster, or ask for fewer log-probabilities, or fewer vectors at once"
        self._replace_events([Failed.of(RequestFailed(f"{slow}: {remedy}"))])
        self.ended = True


def _settle(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


def compact(events: Sequence[Event]) -> list[Event]:
    """The events with deltas of one choice joined. The order within a choice does not change."""
    if len(events) < 2:
        return [*events]
    runs: list[list[Any]] = []  # each becomes one event
    growing: dict[int, list[Delta]] = {}  # by choice: the run that its next delta may join
    room: dict[int, int] = {}  # by choice: bytes that still fit into this run
    for event in events:
        if not isinstance(event, Delta):
            runs.append([event])
            if isinstance(event, Finish):
                growing.pop(event.index, None)
            else:
                growing.clear()
            continue
        run = growing.get(event.index)
        # within one delta, readers take thoughts before text and text before calls
        if run is None or room[event.index] <= 0 or _last_kind(run[-1]) > _first_kind(event):
            run = growing[event.index] = []
            runs.append(run)
            room[event.index] = MAX_JOINED_BYTES
        run.append(event)
        room[event.index] -= event_bytes(event) - EVENT_BYTES
    return [run[0] if len(run) == 1 else join_deltas(run) for run in runs]


def join_deltas(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one choice as one delta. A piece of a call with an id or name begins a new call."""
    calls: list[list[ToolCallDelta]] = []  # the pieces of each call
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        begins = piece.id is not None or piece.name is not None
        if begins or not calls or calls[-1][0].index != piece.index:
            calls.append([])
        calls[-1].append(piece)
    return Delta(
        index=deltas[0].index if deltas else 0,
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=[
            call[0].model_copy(update={"arguments": "".join(piece.arguments for piece in call)})
            for call in calls
        ],
        logprobs=[token for delta in deltas for token in delta.logprobs],
    )


def _first_kind(delta: Delta) -> int:
    """What a delta begins with. 0: thoughts or nothing, 1: text, 2: calls."""
    return 0 if delta.reasoning else 1 if delta.content else 2 if delta.tool_calls else 0


def _last_kind(delta: Delta) -> int:
    return 2 if delta.tool_calls else 1 if delta.content else 0


def event_bytes(event: Event) -> int:
    """Estimate of the memory of an event."""
    if isinstance(event, Embedded):
        return EVENT_BYTES + len(event.vector)
    if not isinstance(event, Delta):
        return EVENT_BYTES
    nbytes = EVENT_BYTES + len(event.content) + len(event.reasoning)
    if event.tool_calls or event.logprobs:
        nbytes += sum(CALL_BYTES + len(call.arguments) for call in event.tool_calls)
        nbytes += LOGPROB_BYTES * sum(1 + len(entry.top) for entry in event.logprobs)
    return nbytes
