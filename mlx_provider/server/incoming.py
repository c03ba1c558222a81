"""Requests as they come in: read within bounds, parsed, and marked with where they come from."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import anyio.to_thread
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.types import Receive, Scope

from ..byte_gate import Ticket
from ..errors import BadRequest
from ..invalid import bad_request
from ..protocol.requests import ModelRequest
from .activity import Activity
from .body import Bodies

T = TypeVar("T", bound=ModelRequest)
AT_ONCE = 2**16
"""Bytes of a body that take less time to parse than a thread to begin."""


@dataclass(frozen=True)
class Incoming:
    """The way in of one app."""

    activity: Activity
    bodies: Bodies
    remote: bool
    """Requests come over a network, and say so to the service."""
    admit: Callable[[Scope], None]
    """Raises where another engine is to serve the request."""

    async def read(self, scope: Scope, receive: Receive, kind: type[T]) -> tuple[T, Ticket]:
        """A request of this kind, and what it holds of the room for bodies: the caller's to close.

        It counts as admitted until the caller's next `await`. Raises `BadRequest` that names the
        first field at fault, and what `Bodies.read` and `admit` raise.
        """
        with ExitStack() as undo:
            with self.activity.reading():
                body = await self.bodies.read(scope, receive)
                undo.callback(body.ticket.close)
                request = await _parsed(kind, body.data)
            self.admit(scope)
            undo.pop_all()
        return request.model_copy(
            update={"origin": "remote"}
        ) if self.remote else request, body.ticket


async def _parsed(kind: type[T], data: bytearray) -> T:
    """A large body is parsed in a thread, so that the streams of others go on."""
    if len(data) <= AT_ONCE:
        return parse_request(kind, data)
    return await anyio.to_thread.run_sync(parse_request, kind, data)


def parse_request(kind: type[T], body: bytes | bytearray) -> T:
    """The request in a JSON body. Raises `BadRequest` that names the first field at fault."""
    try:
        return kind.model_validate(_json(body))
    except ValidationError as error:
        raise bad_request(error, kind) from None


def _json(body: bytes | bytearray) -> object:
    """Bounds can be checked before fields are. A million objects would have Python look for garbage
    a dozen times meanwhile, for seconds in which no other thread runs."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return from_json(body)
    except ValueError as error:
        raise BadRequest(f"body: Invalid JSON: {error}") from None
    finally:
        if collects:
            gc.enable()
