"""Routes that can last as long as their reader: statistics as a stream, and a listener on loopback
with its own key for one agent, which closes with the connection that asked for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
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
        while True:
            stats = await anyio.to_thread.run_sync(self._service.stats)
            yield stats.model_dump_json().encode() + b"\n"
            with anyio.move_on_after(every):
                await self._stopping.wait()
                return


async def until_stopped(stopping: anyio.Event, seconds: float) -> AsyncIterator[None]:
    while not stopping.is_set():
        with anyio.move_on_after(seconds):
            await stopping.wait()
            return
        yield


def _seconds(given: str) -> float:
    with suppress(ValueError):
        if FASTEST <= (every := float(given)) <= SLOWEST:
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


class ListenerRoute:
    def __init__(self, app: Callable[[ListenerRequest], ASGIApp], stopping: anyio.Event) -> None:
        self.listen: Callable[[ASGIApp], AbstractAsyncContextManager[str]]
        """Opens a port and gives its URL. Set by the server that runs the engine."""
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
        async with self.listen(self._app(body)) as url:
            yield url.encode() + b"\n"
            async for _ in until_stopped(self._stopping, HEARTBEAT):
                yield b"\n"
