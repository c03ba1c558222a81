"""Routes that render the prompt of a request without running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ..byte_gate import Ticket
from ..errors import BadRequest
from ..protocol.requests import GenerateRequest
from ..wire.asked import Asked
from .generate import Reader
from .incoming import Incoming
from .threads import in_thread


class Count:
    """`answer`: makes the JSON of the reply, in a thread."""

    def __init__(
        self, incoming: Incoming, read: Reader, answer: Callable[[GenerateRequest], dict[str, Any]]
    ) -> None:
        self._incoming = incoming
        self._read = read
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            asked, ticket = await self._read(self._incoming, scope, receive)
        except ClientDisconnect:
            return
        with self._incoming.activity.counting():
            call = partial(self._answered, asked, ticket)
            answer = await in_thread(call, self._incoming.threads)
        await JSONResponse(answer)(scope, receive, send)

    def _answered(self, asked: Asked, ticket: Ticket) -> dict[str, Any]:
        with ticket, asked.places.naming():
            requests: Sequence[Any] = asked.requests
            if len(requests) != 1:
                raise BadRequest("prompt must be one text or list of token ids", param="prompt")
            return self._answer(requests[0])
