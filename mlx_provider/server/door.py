"""A door to the owner's engine for one agent: a port of loopback with its own key.

`POST /v1/door` on the owner's socket opens it. It closes with that connection, and so with the
program that asked for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from ..bounds import Name
from ..errors import BadRequest
from ..protocol.options import ModelOptions
from .ndjson import NDJSON

HEARTBEAT = 10.0
"""Seconds between two empty lines, which detect a lost connection."""


class DoorRequest(BaseModel):
    """Who may enter, and what every request of the agent means."""

    model_config = ConfigDict(extra="forbid")
    key: str = Field(min_length=32, pattern=r"^[!-~]+$", repr=False)
    model: Name
    options: ModelOptions = ModelOptions()
    max_tokens: int = Field(ge=1)
    """The limit of an answer for which the agent sets none."""

    def fields(self) -> dict[str, Any]:
        """The fields of each request."""
        return {"model": self.model, "options": self.options, "max_tokens": self.max_tokens}


@dataclass(frozen=True)
class OpenDoor:
    """A port that is served."""

    url: str
    close: Callable[[], None]
    """Ends its connections, too."""


class Door:
    """Endpoint of `POST /v1/door`."""

    def __init__(self, app: Callable[[DoorRequest], ASGIApp], stopping: anyio.Event) -> None:
        """`app`: what is behind a door."""
        self.listen: Callable[[ASGIApp], Awaitable[OpenDoor]]
        """The server that runs the engine sets this."""
        self._app = app
        self._stopping = stopping

    async def __call__(self, request: Request) -> Response:
        """A line with the URL; then empty lines while the door is open."""
        try:
            asked = DoorRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise BadRequest(f"body: {error.errors()[0]['msg']}") from None
        return StreamingResponse(self._open(asked), media_type=NDJSON)

    async def _open(self, asked: DoorRequest) -> AsyncIterator[bytes]:
        door = await self.listen(self._app(asked))
        try:
            yield door.url.encode() + b"\n"
            while not self._stopping.is_set():
                with anyio.move_on_after(HEARTBEAT):
                    await self._stopping.wait()
                yield b"\n"
        finally:
            door.close()
