"""Ends the engine on `POST /v1/stop`, at once or when no request runs. An engine that is ending
refuses new requests: their clients start the next engine and send them there."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import BadRequest, EngineUnavailable, MLXProviderError
from ..protocol.event_queue import EventQueue
from ..protocol.events import Failed

UNREAD_TOTAL = 2**29  # bytes of unread replies of all requests
log = logging.getLogger(__name__)


class Activity:
    """The clients and requests that an engine serves now. Used only in the event loop."""

    def __init__(self) -> None:
        self.clients = 0
        self._open: dict[EventQueue, str] = {}  # with the owner of each request
        self._since = time.monotonic()  # when the last of them left

    @contextmanager
    def attach(self) -> Iterator[None]:
        """During the block, one more client keeps the engine running."""
        self.clients += 1
        try:
            yield
        finally:
            self.clients -= 1
            self._since = time.monotonic()

    @contextmanager
    def serving(self, queue: EventQueue, owner: str = "") -> Iterator[None]:
        """During the block, `queue` has the reply to a request. `owner`: the name of its key."""
        self._open[queue] = owner
        try:
            yield
        finally:
            self._open.pop(queue, None)
            self._since = time.monotonic()

    @property
    def requests(self) -> int:
        return len(self._open)

    def idle(self) -> float:
        """Seconds since the last client or request left; 0 while there are any."""
        return 0.0 if self.clients or self.requests else time.monotonic() - self._since

    def relieve(self) -> None:
        """If readers leave too much unread, end the slowest reply of the owner with the most."""
        unread = Counter[str]()
        for queue, owner in self._open.items():
            unread[owner] += queue.unread
        slowest = sorted(self._open, key=lambda queue: queue.unread)
        while unread.total() > UNREAD_TOTAL:
            [(most, _)] = unread.most_common(1)
            queue = next(reply for reply in reversed(slowest) if self._open[reply] == most)
            slowest.remove(queue)
            unread[most] -= queue.unread
            queue.give_up()

    def fail_open(self, error: MLXProviderError) -> None:
        """End all open requests with this error."""
        for queue in self._open:
            queue.put([Failed.of(error)])


class StopRequest(BaseModel):
    """When to end: now, when no request runs (`idle`), or also without other clients (`alone`)."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(max_length=10_000)
    when: Literal["now", "idle", "alone"]


class Handover:  # decides when this engine ends, so that the next one can start
    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._requested: set[str] = set()  # `StopRequest.when` so far
        self.ending = False
        self.stop: Callable[[], None] = lambda: None  # ends the process; the server sets it

    async def end(self, request: Request) -> Response:
        """Takes a `StopRequest`; answers `{"ends": bool, "clients": int, "requests": int}`."""
        try:
            body = StopRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise BadRequest(f"body: {error.errors()[0]['msg']}") from None
        self._requested.add(body.when)
        counts = {"clients": self._activity.clients, "requests": self._activity.requests}
        if ends := self.due(others=1):
            self.ending = True
            self.stop()
        log.info("the engine ends%s (%s): %s", "" if ends else " if idle", body.reason, counts)
        return JSONResponse({"ends": ends, **counts})

    def admit(self, _: object) -> None:
        """Raises `EngineUnavailable` if this engine is ending: its client then starts the next."""
        if self.ending:
            raise EngineUnavailable("a new engine replaces this one")

    def due(self, others: int = 0) -> bool:
        """Whether to end now. `others`: clients that do not prevent the end, as who asks for it."""
        now = "now" in self._requested
        if now or self._activity.requests:
            return now
        alone = "alone" in self._requested and self._activity.clients <= others
        return alone or "idle" in self._requested
