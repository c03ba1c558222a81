"""A loopback listener with its own key for one agent. It closes with the connection that asked."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from ..bounds import Name
from ..errors import BadRequest
from ..protocol.requests import ModelOptions
from .incoming import NDJSON

HEARTBEAT = 10.0  # seconds between empty lines, which detect a lost connection


async def until_stopped(stopping: anyio.Event, seconds: float) -> AsyncIterator[None]:
    """Yields every `seconds`, and ends when `stopping` is set."""
    while not stopping.is_set():
        with anyio.move_on_after(seconds):
            await stopping.wait()
            return
        yield


class ListenerRequest(BaseModel):
    """The key that the agent will send. All its requests get this model and these options."""

    model_config = ConfigDict(extra="forbid")
    key: str = Field(min_length=32, pattern=r"^[!-~]+$", repr=False)
    model: Name
    options: ModelOptions = ModelOptions()
    max_tokens: int = Field(ge=1)  # of a request that names no limit


class ListenerRoute:
    """The route that opens a listener. `app` makes the application that the agent then uses."""

    def __init__(self, app: Callable[[ListenerRequest], ASGIApp], stopping: anyio.Event) -> None:
        self.listen: Callable[[ASGIApp], AbstractAsyncContextManager[str]]
        """Opens a port and gives its URL. Set by the server that runs the engine."""
        self._app = app
        self._stopping = stopping

    async def open(self, request: Request) -> Response:
        """Responds with a line with the URL, then with empty lines while the listener is open."""
        try:
            body = ListenerRequest.model_validate_json(await request.body())
        except ValidationError as error:
            raise BadRequest(f"body: {error.errors()[0]['msg']}") from None
        return StreamingResponse(self._lines(body), media_type=NDJSON)

    async def _lines(self, body: ListenerRequest) -> AsyncIterator[bytes]:
        async with self.listen(self._app(body)) as url:
            yield url.encode() + b"\n"
            async for _ in until_stopped(self._stopping, HEARTBEAT):
                yield b"\n"
