"""`POST /v1/count`: counts the prompt tokens of a request without running it."""

from __future__ import annotations

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ..byte_gate import Ticket
from ..protocol.requests import GenerateRequest
from ..serving.interface import Service
from .incoming import Incoming

COUNTING = 4
"""Prompts that are counted at once. Others wait."""


class Count:
    """ASGI endpoint. Takes a request as for `/v1/generate` and returns `{"prompt_tokens": N}`."""

    def __init__(self, service: Service, incoming: Incoming) -> None:
        self._service = service
        self._incoming = incoming
        self._limiter = anyio.CapacityLimiter(COUNTING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request, ticket = await self._incoming.read(scope, receive, GenerateRequest)
        except ClientDisconnect:
            return
        with self._incoming.activity.counting():
            count = await anyio.to_thread.run_sync(
                self._count, request, ticket, limiter=self._limiter
            )
        await JSONResponse({"prompt_tokens": count})(scope, receive, send)

    def _count(self, request: GenerateRequest, ticket: Ticket) -> int:
        with ticket:
            return self._service.count(request)
