"""Requests as they come in: read within bounds, parsed, and marked with where they come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError
from starlette.types import Receive, Scope

from ..byte_gate import Ticket
from ..errors import MLXProviderError
from ..invalid import bad_request
from ..protocol.messages import ModelRequest
from .activity import Activity
from .body import Bodies

T = TypeVar("T", bound=ModelRequest)


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
        with self.activity.reading():
            body = await self.bodies.read(scope, receive)
        try:
            request = parse_request(kind, body.data)
            self.admit(scope)
        except MLXProviderError:
            body.ticket.close()
            raise
        return request.model_copy(
            update={"origin": "remote"}
        ) if self.remote else request, body.ticket


def parse_request(kind: type[T], body: bytes | bytearray) -> T:
    """The request in a JSON body. Raises `BadRequest` that names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error, kind) from None
