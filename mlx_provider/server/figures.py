"""`GET /v1/figures`: live statistics of the engine, once or as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..errors import BadRequest, Overloaded
from ..serving.interface import Service
from .ndjson import NDJSON

FASTEST, SLOWEST = 0.2, 60.0
"""Seconds between two lines."""
STREAMS = 16
"""Open streams. Each costs a snapshot per line."""


class FiguresRoute:
    def __init__(self, service: Service, stopping: anyio.Event) -> None:
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
