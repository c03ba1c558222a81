"""Routes that can last as long as their reader. `GET /v1/stats`: live statistics of the engine,
once or as a stream. `POST /v1/listener` on the owner's socket: a listener on loopback with its own
key for one agent, which closes with that connection, so with the program that asked for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..bounds import Name
from ..errors import BadRequest, Overloaded
from ..protocol.requests import ModelOptions
from .incoming import NDJSON

if TYPE_CHECKING:
    from ..serving.service import ChatService

FASTEST, SLOWEST = 0.2, 60.0
"""Seconds between two lines."""
STREAMS = 16
"""Open streams. Each costs a snapshot per line."""
HEARTBEAT = 10.0
"""Seconds between empty lines, which detect a lost connection."""


class StatsRoute:
    def __init__(self, service: ChatService, stopping: anyio.Event) -> None:
        self._service = service
        self._stopping = stopping
        self.streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        every = Request(scope).query_params.get("stream")
        if every is None:
            stats = await anyio.to_thread.run_sync(self._service.stats)
            await JSONResponse(stats.model_dump())(scope, receive, send)
            return
        seconds = _seconds(every)
        if self.streams >= STREAMS:
            raise Overloaded(f"{STREAMS} others watch the engine, the limit; try again later")
        self.streams += 1
        try:
            lines = StreamingResponse(self._lines(seconds), media_type=NDJSON)
            await lines(scope, receive, send)
        finally:
            self.streams -= 1

    async def _lines(self, every: float) -> AsyncIterator[bytes]:
        yield await self._line()
        async for _ in until_stopped(self._stopping, every):
            yield await self._line()

    async def _line(self) -> bytes:
        stats = await anyio.to_thread.run_sync(self._service.stats)
        return stats.model_dump_json().encode() + b"\n"


async def until_stopped(stopping: anyio.Event, seconds: float) -> AsyncIterator[None]:
    """Yields every `seconds`."""
    while not stopping.is_set():
        with anyio.move_on_after(seconds):
            await stopping.wait()
            return
        yield


def _seconds(given: str) -> float:
    """Raises `BadRequest` if it is no number or out of bounds."""
    try:
        every = float(given)
    except ValueError:
        every = -1.0
    if FASTEST <= every <= SLOWEST:
        return every
    raise BadRequest(
        f"stream is the seconds between two lines, {FASTEST:g} .. {SLOWEST:g}", param="stream"
    )


class ListenerRequest(BaseModel):
    """Key of the agent, and fields that each of its requests gets."""

    model_config = ConfigDict(extra="forbid")
    key: str = Field(min_length=32, pattern=r"^[!-~]+$", repr=False)
    model: Name
    options: ModelOptions = ModelOptions()
    max_tokens: int = Field(ge=1)


@dataclass(frozen=True)
class OpenListener:
    url: str
    close: Callable[[], None]
    """Ends its connections, too."""


class ListenerRoute:
    def __init__(self, app: Callable[[ListenerRequest], ASGIApp], stopping: anyio.Event) -> None:
        """`app`: serves the requests of a listener."""
        self.listen: Callable[[ASGIApp], Awaitable[OpenListener]]
        """Set by the server that runs the engine."""
        self._app = app
        self._stopping = stopping

    async def __call__(self, request: Request) -> Response:
        """A line with the URL; then empty lines while the listener is open."""
        try:
            body = ListenerRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise BadRequest(f"body: {error.errors()[0]['msg']}") from None
        return StreamingResponse(self._open(body), media_type=NDJSON)

    async def _open(self, body: ListenerRequest) -> AsyncIterator[bytes]:
        opened = await self.listen(self._app(body))
        try:
            yield opened.url.encode() + b"\n"
            async for _ in until_stopped(self._stopping, HEARTBEAT):
                yield b"\n"
        finally:
            opened.close()
