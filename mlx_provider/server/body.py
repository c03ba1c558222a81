"""Reads request bodies, limited in bytes, values and time."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from ..bounds import Values
from ..byte_gate import ByteGate, Ticket
from ..errors import BadRequest, BodyTooLarge, EngineUnavailable, RequestTimedOut
from .keys import owner_of

SMALL = 2**20
"""Bytes of the largest body that does not wait behind large ones."""
SMALL_ROOM = 64 * 2**20
PARSED_AT_ONCE = 2
MAX_VALUES = 2**21
"""JSON values of one body. Each takes about a hundred bytes once parsed, but may be only 3 in the
body (`{},`)."""
SILENCE = 60.0
"""Seconds without a byte until a body is abandoned."""
DRAIN_SECONDS = 5.0
"""Seconds for discarding the rest of a body that is too large. Closing a connection with unread
bytes resets it, and the answer is lost."""


@dataclass
class Body:
    data: bytearray
    ticket: Ticket


class Bodies:
    """Limits the total bytes of all bodies. A body counts with its bytes so far, and waits only for
    others of its key, see `ByteGate`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._large = ByteGate(limit)
        self._small = ByteGate(SMALL_ROOM)
        self.parsing = ByteGate(PARSED_AT_ONCE)

    async def read(self, scope: Scope, receive: Receive) -> Body:
        """The caller must close the ticket. Raises `BodyTooLarge`, `RequestTimedOut`, `BadRequest`,
        `ClientDisconnect`."""
        headers = Headers(scope=scope)
        length = _length(headers)
        if length is not None and length > self._limit:
            if "expect" not in headers:
                await _drain(receive)
            raise self._too_large(f"{length} bytes")
        gate = self._small if (length or 0) <= SMALL else self._large
        with ExitStack() as undo:
            body = Body(bytearray(), gate.ask(0, owner_of(scope)))
            undo.callback(lambda: body.ticket.close())
            await self._read(body, receive)
            undo.pop_all()
        return body

    async def _charge(self, ticket: Ticket, size: int) -> Ticket:
        """Wait until a body may have so many bytes. Returns its new ticket."""
        if size <= SMALL or ticket.gate is self._large:
            return await ticket.grow(size)
        larger = await self._large.ask(size, ticket.owner).arrive()
        ticket.close()
        return larger

    def close(self) -> None:
        stopping = EngineUnavailable("the engine is stopping")
        for gate in (self._small, self._large, self.parsing):
            gate.refuse(stopping)

    async def _read(self, body: Body, receive: Receive) -> None:
        data, values, more = body.data, Values(), True
        while more:
            piece, more = await _piece(receive)
            if len(data) + len(piece) > self._limit:
                data.clear()
                await _drain(receive, more)
                raise self._too_large(f"more than {self._limit} bytes")
            body.ticket = await self._charge(body.ticket, len(data) + len(piece))
            data += piece
            values.take(piece)
            if values.count > MAX_VALUES:
                data.clear()
                await _drain(receive, more)
                raise BodyTooLarge(f"the body has more than {MAX_VALUES} JSON values")

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body has {size}; this engine takes {self._limit}: send fewer or smaller images"
        )


async def _piece(receive: Receive) -> tuple[bytes, bool]:
    with anyio.move_on_after(SILENCE):
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)
    raise RequestTimedOut(f"no byte of the body came within {SILENCE:g} s")


async def _drain(receive: Receive, more: bool = True) -> None:
    with anyio.move_on_after(DRAIN_SECONDS):
        while more:
            _, more = await _piece(receive)


def _length(headers: Headers) -> int | None:
    """The announced length. Raises `BadRequest` if it is no number."""
    given = headers.get("content-length")
    if given is None or "transfer-encoding" in headers:
        return None
    if not (given.isascii() and given.isdigit()):
        raise BadRequest(f"content-length {given!r} is not a number")
    return int(given)
