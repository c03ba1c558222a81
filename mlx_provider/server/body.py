"""Bodies of requests: bounded in bytes, in values and in time, while they are read."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from ..bounds import Values
from ..byte_gate import ByteGate, Ticket
from ..config import PREFIX
from ..errors import BadRequest, BodyTooLarge, EngineUnavailable, RequestTimedOut

SMALL = 2**20
"""Bytes of a body that does not wait behind large ones."""
SMALL_ROOM = 64 * 2**20
"""Bytes of small bodies at once."""
MAX_VALUES = 2**21
"""JSON values of one body: each takes some hundred bytes once it is parsed, `{},` in the body 3."""
SILENCE = 60.0
"""Seconds without a byte after which a body is given up."""
DRAIN_SECONDS = 5.0
"""Seconds in which the rest of a body that is too large is thrown away.

A connection that is closed over unread bytes is reset, and the answer lost with it.
"""


@dataclass(frozen=True)
class Body:
    """A whole body, and what it holds of the bound on all of them."""

    data: bytearray
    ticket: Ticket


class Bodies:
    """The bodies of one engine, of which so many bytes are in memory at once.

    One whose length is not announced counts as `limit` bytes until it has ended.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._large = ByteGate(limit)
        self._small = ByteGate(SMALL_ROOM)

    async def read(self, scope: Scope, receive: Receive) -> Body:
        """Wait for room, then read. The ticket is the caller's to close.

        Raises `BodyTooLarge`, `RequestTimedOut`, `BadRequest`, and `ClientDisconnect`.
        """
        headers = Headers(scope=scope)
        length = _length(headers)
        if length is not None and length > self._limit:
            if "expect" not in headers:
                await _drain(receive)
            raise self._too_large(f"{length} bytes")
        size = self._limit if length is None else length
        gate = self._small if size <= SMALL else self._large
        ticket = await gate.ask(size).arrive()
        with ExitStack() as undo:
            undo.callback(ticket.close)
            data = await self._read(receive)
            undo.pop_all()
        ticket.keep(len(data))
        return Body(data, ticket)

    def close(self) -> None:
        """End the waiting of everyone."""
        stopping = EngineUnavailable("the engine is stopping")
        for gate in (self._small, self._large):
            gate.refuse(stopping)

    async def _read(self, receive: Receive) -> bytearray:
        data, values, more = bytearray(), Values(), True
        while more:
            piece, more = await _piece(receive)
            if len(data) + len(piece) > self._limit:
                data.clear()
                await _drain(receive, more)
                raise self._too_large(f"more than {self._limit} bytes")
            data += piece
            values.take(piece)
            if values.count > MAX_VALUES:
                data.clear()
                await _drain(receive, more)
                raise BodyTooLarge(f"the body has more than {MAX_VALUES} JSON values")
        return data

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body has {size}; this engine takes {self._limit}: send fewer or smaller images, "
            f"or let the operator raise {PREFIX}BODY_BYTES"
        )


async def _piece(receive: Receive) -> tuple[bytes, bool]:
    """The next bytes of a body, and whether more follow."""
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
    """The announced length. Raises `BadRequest` where it is no number."""
    given = headers.get("content-length")
    if given is None or "transfer-encoding" in headers:
        return None
    if not (given.isascii() and given.isdigit()):
        raise BadRequest(f"content-length {given!r} is no number")
    return int(given)
