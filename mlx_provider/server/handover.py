"""Replaces the engine with a newer one without interrupting a request.

`POST /v1/stop` asks for it. An engine whose plugins have changed on disk starts it at the next
request: it refuses that request, and the client sends it to the engine that it then starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from ..errors import BadRequest, EngineUnavailable
from ..protocol.requests import STARTS_ENGINES
from .access import error_response
from .activity import Activity
from .out_of_date import OutOfDate

log = logging.getLogger(__name__)

STARTS = tuple(each.encode() for each in STARTS_ENGINES)
NEXT = "it is replaced at the next request, if no other request runs"
REMOTE = "it continues unchanged until its operator restarts it"
OTHERS = "it is replaced at the first request of a client of the new version"


class StopRequest(BaseModel):
    """When to end: at once, without requests, or also without other clients."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(max_length=10_000)
    when: Literal["now", "idle", "alone"]


class Handover:
    def __init__(
        self,
        activity: Activity,
        out_of_date: OutOfDate | None = None,
        *,
        remote: bool = False,
    ) -> None:
        """`remote`: clients on other machines cannot start an engine."""
        self._activity = activity
        self._out_of_date = out_of_date
        self._remote = remote
        self._asked: dict[str, StopRequest] = {}
        self._noticed: list[str] = []
        self.ending = False
        self.stop: Callable[[], None] = lambda: None
        """The server sets this to end the process."""

    async def __call__(self, request: Request) -> Response:
        """`{"ends": bool, "clients": int, "requests": int}`."""
        try:
            asked = StopRequest.model_validate_json(await request.body())
        except ValidationError as error:
            return error_response(BadRequest(f"body: {error.errors()[0]['msg']}"))
        self._asked[asked.when] = asked
        ends = self.due(others=1)
        log.log(
            logging.INFO if ends else logging.WARNING,
            "%s (%s): %d clients, %d requests",
            "the engine ends" if ends else "the engine ends when it is idle",
            asked.reason, self._activity.clients, self._activity.requests,
        )  # fmt: skip
        if ends:
            self._end()
        return JSONResponse({"ends": ends, **self._counts()})

    def admit(self, scope: Scope) -> None:
        """Raises `EngineUnavailable` if this engine is ending, or is out of date and the client can
        start another."""
        if not self.ending:
            changes = self._notice() if STARTS in scope["headers"] else []
            if not self._renews(changes) or self._activity.requests:
                return
            log.info("a new engine replaces this one: %s", "; ".join(changes))
            self._end()
        raise EngineUnavailable("a new engine replaces this one")

    def out_of_date(self) -> list[str]:
        changes = self._changes()
        return [*changes, self._outlook(changes)] if changes else []

    def due(self, others: int = 0) -> bool:
        """`others`: clients that do not prevent the end."""
        if "now" in self._asked:
            return True
        if self._activity.requests:
            return False
        alone = "alone" in self._asked and self._activity.clients <= others
        renews = bool(self._noticed) and self._renews(self._changes())
        return alone or "idle" in self._asked or renews

    def _changes(self) -> list[str]:
        return [] if self._out_of_date is None else self._out_of_date.changes()

    def _notice(self) -> list[str]:
        """Each new list of changes is logged once."""
        changes = self._changes()
        if changes != self._noticed:
            self._noticed = changes
            if changes and self._activity.requests:
                listed = "; ".join(changes)
                log.warning("the engine is out of date: %s: %s", listed, self._outlook(changes))
        return changes

    def _renews(self, changes: list[str]) -> bool:
        known = None if self._remote else self._out_of_date
        return known is not None and known.replaceable(changes)

    def _outlook(self, changes: list[str]) -> str:
        if self._remote:
            return REMOTE
        return NEXT if self._renews(changes) else OTHERS

    def _end(self) -> None:
        self.ending = True
        self.stop()

    def _counts(self) -> dict[str, Any]:
        return {"clients": self._activity.clients, "requests": self._activity.requests}
