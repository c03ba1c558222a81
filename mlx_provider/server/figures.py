"""`GET /v1/figures`: what the engine does now, once or as often as is asked, until it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..errors import BadRequest, Overloaded
from ..serving.interface import Service
from .generate import NDJSON

FASTEST, SLOWEST = 0.2, 60.0
"""Seconds between two lines."""
STREAMS = 16
"""That are open at once: each costs a snapshot a line."""


class FiguresRoute:
    """The endpoint. Nothing is made where nobody looks."""

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
        return StreamingResponse(self._lines(seconds), media_type=NDJSON)

    async def _lines(self, every: float) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            while not self._stopping.is_set():
                figures = await anyio.to_thread.run_sync(self._service.figures)
                yield figures.model_dump_json().encode() + b"\n"
                with anyio.move_on_after(every):
                    await self._stopping.wait()
        finally:
            self._streams -= 1


def _seconds(given: str) -> float:
    """Raises `BadRequest` for what is none, or out of bounds."""
    try:
        every = float(given)
    except ValueError:
        every = -1.0
    if FASTEST <= every <= SLOWEST:
        return every
    raise BadRequest(
        f"stream is the seconds between two lines, {FASTEST:g} .. {SLOWEST:g}", param="stream"
    )
