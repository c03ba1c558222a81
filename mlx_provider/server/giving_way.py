"""`POST /v1/stop`: an engine gives way to a newer one as soon as it disturbs nobody."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import BadRequest
from .access import error_response
from .activity import Activity

log = logging.getLogger(__name__)


class StopRequest(BaseModel):
    """Why the engine should end, and when: at once, without requests, or without others, too."""

    model_config = ConfigDict(extra="forbid")
    reason: str = Field(max_length=10_000)
    when: Literal["now", "idle", "alone"]


class GivingWay:
    """Ends the process when asked to, as soon as what it was told to wait for is so."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._asked: StopRequest | None = None
        self.stop: Callable[[], None] = lambda: None
        """Ends the process; set by the server that runs it."""

    async def __call__(self, request: Request) -> Response:
        """What becomes of the wish: `{"ends": bool, "clients": int, "requests": int}`."""
        try:
            self._asked = StopRequest.model_validate_json(await request.body())
        except ValidationError as error:
            return error_response(BadRequest(f"body: {error.errors()[0]['msg']}"))
        ends = self.due(others=1)
        log.log(
            logging.INFO if ends else logging.WARNING,
            "%s (%s): %d clients, %d requests",
            "the engine ends" if ends else "the engine ends when it is idle",
            self._asked.reason, self._activity.clients, self._activity.requests,
        )  # fmt: skip
        if ends:
            self.stop()
        return JSONResponse({"ends": ends, **self._told()})

    def due(self, others: int = 0) -> bool:
        """Whether the engine should end. `others`: clients that count as nobody."""
        if self._asked is None or self._asked.when == "now":
            return self._asked is not None
        alone = self._asked.when == "idle" or self._activity.clients <= others
        return alone and not self._activity.requests

    def _told(self) -> dict[str, Any]:
        return {"clients": self._activity.clients, "requests": self._activity.requests}
