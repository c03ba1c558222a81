"""Routes that can last as long as their reader. `GET /v1/figures`: live statistics of the engine,
once or as a stream. `POST /v1/listener` on the owner's socket: a listener on loopback with its own
key for one agent, which closes with that connection, so with the program that asked for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


class FiguresRoute:
    def __init__(self, service: ChatService, stopping: anyio.Event) -> None:
        self._service = service
        self._stopping = stopping
        self._streams = 0

    async def __call__(self, request: Request) -> Response:
        every = request.query_params.get("stream")
        if every is None:
            figures = await anyio.to_thread.run_sync(self._service.figures)
            return JSONResponse(figures.model_dump())
        seconds = _seconds(every)
        if self._streams >= STREAMS:
            raise Overloaded(f"{STREAMS} others watch the engine, the limit; try again later")
        return _Watched(self, self._lines(seconds))

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def _lines(self, every: float) -> AsyncIterator[bytes]:
        while not self._stopping.is_set():
            figures = await anyio.to_thread.run_sync(self._service.figures)
            yield figures.model_dump_json().encode() + b"\n"
            with anyio.move_on_after(every):
                await self._stopping.wait()


class _Watched(StreamingResponse):
    """Counted from its head on: a body that is never read would not be counted."""

    def __init__(self, route: FiguresRoute, lines: AsyncIterator[bytes]) -> None:
        super().__init__(lines, media_type=NDJSON)
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._route.watching():
            await super().__call__(scope, receive, send)


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

    def fields(self) -> dict[str, Any]:
        return {"model": self.model, "options": self.options, "max_tokens": self.max_tokens}


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
            asked = ListenerRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise BadRequest(f"body: {error.errors()[0]['msg']}") from None
        return StreamingResponse(self._open(asked), media_type=NDJSON)

    async def _open(self, asked: ListenerRequest) -> AsyncIterator[bytes]:
        opened = await self.listen(self._app(asked))
        try:
            yield opened.url.encode() + b"\n"
            while not self._stopping.is_set():
                with anyio.move_on_after(HEARTBEAT):
                    await self._stopping.wait()
                yield b"\n"
        finally:
            opened.close()
