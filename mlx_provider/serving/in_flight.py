"""The requests in flight: one entry each, from arrival to end."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..chat.media.room import MediaClaim
from ..engine.request import Request
from ..errors import BadRequest, MLXProviderError, RequestFailed
from ..protocol.event_queue import EventQueue
from ..protocol.events import Failed
from .model_cache import Lease
from .weights import EngineInstance


@dataclass(frozen=True)
class Active:
    """A request's place on its model. The methods are the engine thread's."""

    request: Request
    """The engine's own."""
    lease: Lease
    """Its hold on the model."""
    instance: EngineInstance
    """Its engine."""

    def cancel(self) -> None:
        """Idempotent."""
        self.instance.engine.cancel(self.request)

    def fail(self, error: MLXProviderError) -> None:
        """Its reader is told."""
        self.instance.engine.fail(self.request, error)


@dataclass(eq=False)
class Entry:
    """One request: whom it answers, and what it holds until its end."""

    id: str
    queue: EventQueue
    media: MediaClaim
    model: str
    """As it was asked for."""
    arrived: float
    """Monotonic seconds."""
    active: Active | None = None
    """`None` while it is prepared."""

    def check_wanted(self) -> None:
        """Raises `RequestFailed` where nobody waits for its events any more."""
        if self.queue.ended:
            raise RequestFailed.cancelled()

    def let_go(self) -> None:
        """Give back its room for images and its model. Idempotent."""
        self.media.close()
        if self.active is not None:
            self.active.lease.end()


class InFlight:
    """Any thread; one lock for all entries and for what engines are about to get."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def arrive(self, entry: Entry) -> None:
        """An id is one request's: whoever cancels by it means that one. Raises `BadRequest`."""
        with self._lock:
            if self._entries.setdefault(entry.id, entry) is not entry:
                raise BadRequest("another request with this id is being served", param="id")

    def enter(self, entry: Entry, request: Request, lease: Lease) -> Active:
        """Let a request in: the engine has room for it, and it is on its way there.

        Raises what the scheduler's `check` raises, `RequestFailed` where nobody wants it.
        """
        instance = lease.view.instance
        with self._lock:
            entry.check_wanted()
            instance.engine.scheduler.check(request, instance.arriving)
            instance.arriving += 1
            entry.active = Active(request, lease, instance)
            return entry.active

    def reached(self, active: Active) -> None:
        """The engine thread has it."""
        with self._lock:
            active.instance.arriving -= 1

    def cancel(self, name: str) -> Entry | None:
        """The request of this id; one that is still prepared will not be let in."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.active is None:
                entry.queue.put([Failed.of(RequestFailed.cancelled())])
            return entry

    def of(self, request: Request) -> tuple[Entry, Active] | None:
        """The entry of an engine's request, where it was not forgotten."""
        entry = self._entries.get(request.id)
        if entry is None or entry.active is None or entry.active.request is not request:
            return None
        return entry, entry.active

    def active(self) -> list[Active]:
        """Every request that was let in."""
        with self._lock:
            return [each.active for each in self._entries.values() if each.active is not None]

    def all(self) -> list[Entry]:
        """Every request, oldest first, without keeping anybody from coming or going."""
        return sorted(self._entries.values(), key=lambda entry: entry.arrived)

    def leave(self, entry: Entry) -> None:
        """It has ended, and lets go of what it holds."""
        with self._lock:
            if self._entries.get(entry.id) is entry:
                del self._entries[entry.id]
        entry.let_go()

    def clear(self) -> list[Entry]:
        """Forget all that were let in, which is for the caller to end; others end by themselves."""
        with self._lock:
            gone = [entry for entry in self._entries.values() if entry.active is not None]
            for entry in gone:
                del self._entries[entry.id]
        return gone
