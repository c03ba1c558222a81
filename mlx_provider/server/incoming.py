"""Reads requests within limits, parses them, and marks their origin."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.types import Receive, Scope

from ..byte_gate import Ticket
from ..errors import BadRequest
from ..invalid import bad_request, shown
from ..protocol.requests import ModelRequest
from .activity import Activity
from .body import Bodies, Body
from .threads import in_thread

R = TypeVar("R")
T = TypeVar("T", bound=ModelRequest)
AT_ONCE = 2**16
"""Bytes that are parsed faster than a thread starts."""
THREADS = 1024


@dataclass(frozen=True)
class Incoming:
    activity: Activity
    bodies: Bodies
    marks: Callable[[Scope, str | None], dict[str, Any]]
    """(scope, tenant in the request) -> fields that a client cannot choose."""
    admit: Callable[[Scope], None]
    """Raises if another engine must serve the request."""
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(THREADS))
    """Requests prepared at once. Most of their threads wait."""

    async def read(self, scope: Scope, receive: Receive, kind: type[T]) -> tuple[T, Ticket]:
        request, ticket = await self.read_as(scope, receive, partial(parse_request, kind))
        return request.model_copy(update=self.marks(scope, request.tenant)), ticket

    async def read_as(
        self, scope: Scope, receive: Receive, parse: Callable[[bytearray], R]
    ) -> tuple[R, Ticket]:
        """A body as `parse` reads it, and its ticket for the memory of bodies, which the caller
        must close.

        Counts as admitted until the caller's next `await`. Raises the errors of `parse`,
        `Bodies.read` and `admit`."""
        with ExitStack() as undo:
            with self.activity.reading():
                body = await self.bodies.read(scope, receive)
                undo.callback(body.ticket.close)
                parsed = await self._parsed(parse, body)
            self.admit(scope)
            undo.pop_all()
        return parsed, body.ticket

    async def _parsed(self, parse: Callable[[bytearray], R], body: Body) -> R:
        """Large bodies are parsed in threads, so that streams continue."""
        if len(body.data) <= AT_ONCE:
            return parse(body.data)
        with await self.bodies.parsing.ask(1, body.ticket.owner).arrive():
            return await in_thread(partial(parse, body.data))


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    value = _json(body)
    if not isinstance(value, dict):
        raise BadRequest(f"body: must be an object, got {shown(value)}")
    return value


def parse_request(kind: type[T], body: bytes | bytearray) -> T:
    """Raises `BadRequest` that names the first invalid field."""
    try:
        return kind.model_validate(_json(body))
    except ValidationError as error:
        raise bad_request(error, kind) from None


def _json(body: bytes | bytearray) -> object:
    """Parses before fields are validated, so that limits are checked first. Garbage collection is
    off, because a million objects would trigger it a dozen times."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return from_json(body)
    except ValueError as error:
        raise BadRequest(f"body: Invalid JSON: {error}") from None
    finally:
        if collects:
            gc.enable()
