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
from .next_prompt import Turn
from .weights import EngineInstance


@dataclass(frozen=True)
class Active:
    """A request that runs on a model. The methods belong to the engine thread."""

    request: Request
    lease: Lease
    instance: EngineInstance

    def cancel(self) -> None:
        """Idempotent."""
        self.instance.engine.cancel(self.request)

    def fail(self, error: MLXProviderError) -> None:
        self.instance.engine.fail(self.request, error)


@dataclass(eq=False)
class Entry:
    id: str
    queue: EventQueue
    media: MediaClaim
    model: str
    arrived: float
    """Monotonic seconds."""
    active: Active | None = None
    """`None` during its preparation."""
    turn: Turn | None = None
    """Set if the reply may end with calls."""

    def check_wanted(self) -> None:
        """Raises `RequestFailed` if nothing waits for its events."""
        if self.queue.ended:
            raise RequestFailed.cancelled()

    def let_go(self) -> None:
        """Release its image memory and its model. Idempotent."""
        self.media.close()
        if self.active is not None:
            self.active.lease.end()


class InFlight:
    """Safe from any thread. One lock covers all entries and the requests that have not reached
    their engines."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()

    def arrive(self, entry: Entry) -> None:
        """Raises `BadRequest` if its id is in use, because clients cancel by id."""
        with self._lock:
            if self._entries.setdefault(entry.id, entry) is not entry:
                raise BadRequest("another request with this id is being served", param="id")

    def enter(self, entry: Entry, request: Request, lease: Lease) -> Active:
        """Admit a request. Raises the errors of the scheduler's `check`, and `RequestFailed` if
        nothing waits for it."""
        instance = lease.view.instance
        with self._lock:
            entry.check_wanted()
            instance.engine.scheduler.check(request, instance.arriving)
            instance.arriving.append(request.account)
            entry.active = Active(request, lease, instance)
            return entry.active

    def reached(self, active: Active) -> None:
        with self._lock:
            active.instance.arriving.remove(active.request.account)

    def cancel(self, name: str) -> Entry | None:
        """A request in preparation will not be admitted."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.active is None:
                entry.queue.put([Failed.of(RequestFailed.cancelled())])
            return entry

    def of(self, request: Request) -> tuple[Entry, Active] | None:
        entry = self._entries.get(request.id)
        if entry is None or entry.active is None or entry.active.request is not request:
            return None
        return entry, entry.active

    def active(self) -> list[Active]:
        with self._lock:
            return [each.active for each in self._entries.values() if each.active is not None]

    def all(self) -> list[Entry]:
        """Oldest first. Does not block arrivals or ends."""
        return sorted(self._entries.values(), key=lambda entry: entry.arrived)

    def leave(self, entry: Entry) -> None:
        with self._lock:
            if self._entries.get(entry.id) is entry:
                del self._entries[entry.id]
        entry.let_go()

    def clear(self) -> list[Entry]:
        """Remove all admitted requests, which the caller must end. Those in preparation end by
        themselves."""
        with self._lock:
            gone = [entry for entry in self._entries.values() if entry.active is not None]
            for entry in gone:
                del self._entries[entry.id]
        return gone
