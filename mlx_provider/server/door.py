"""A listener for one agent: a loopback port of the owner's engine with its own key.

`POST /v1/door` on the owner's socket opens it. It closes with that connection, so with the program
that asked for it."""

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
"""Seconds between empty lines, which detect a lost connection."""


class DoorRequest(BaseModel):
    """Key of the agent, and fields that each of its requests gets."""

    model_config = ConfigDict(extra="forbid")
    key: str = Field(min_length=32, pattern=r"^[!-~]+$", repr=False)
    model: Name
    options: ModelOptions = ModelOptions()
    max_tokens: int = Field(ge=1)

    def fields(self) -> dict[str, Any]:
        return {"model": self.model, "options": self.options, "max_tokens": self.max_tokens}


@dataclass(frozen=True)
class OpenDoor:
    url: str
    close: Callable[[], None]
    """Ends its connections, too."""


class Door:
    def __init__(self, app: Callable[[DoorRequest], ASGIApp], stopping: anyio.Event) -> None:
        """`app`: serves the requests of a listener."""
        self.listen: Callable[[ASGIApp], Awaitable[OpenDoor]]
        """Set by the server that runs the engine."""
        self._app = app
        self._stopping = stopping

    async def __call__(self, request: Request) -> Response:
        """A line with the URL; then empty lines while the listener is open."""
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
