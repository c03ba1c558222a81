"""Reads request bodies, limited in bytes, values and time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import anyio
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from ..bounds import Values
from ..byte_gate import ByteGate, Ticket
from ..errors import BadRequest, BodyTooLarge, EngineUnavailable, RequestTimedOut

SMALL = 2**20
"""Largest body in bytes that does not wait behind large ones."""
SMALL_ROOM = 64 * 2**20
"""Bytes of small bodies in memory at once."""
MAX_VALUES = 2**21
"""JSON values of one body. Each needs about a hundred bytes once parsed, but only 3 in the body
(`{},`)."""
SILENCE = 60.0
"""Seconds without a byte after which a body is abandoned."""
DRAIN_SECONDS = 5.0
"""Seconds for discarding the rest of a body that is too large.

A connection that is closed with unread bytes is reset, and the answer is lost with it.
"""


@dataclass(frozen=True)
class Body:
    """A complete body, and its share of the limit on all bodies."""

    data: bytearray
    ticket: Ticket


@dataclass
class _Room:
    """The memory of a body that is read."""

    gate: ByteGate
    ticket: Ticket

    def close(self) -> None:
        self.ticket.close()


class Bodies:
    """The bodies of one engine, limited in their total bytes.

    A body without an announced length counts with its bytes so far, rounded up: first as a small
    body, then as twice as much each time. Only one such body at a time grows beyond a small one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._large = ByteGate(limit)
        self._small = ByteGate(SMALL_ROOM)
        self._growing = anyio.Lock()

    async def read(self, scope: Scope, receive: Receive) -> Body:
        """Wait for memory, then read. The caller must close the ticket.

        Raises `BodyTooLarge`, `RequestTimedOut`, `BadRequest`, and `ClientDisconnect`.
        """
        headers = Headers(scope=scope)
        length = _length(headers)
        if length is not None and length > self._limit:
            if "expect" not in headers:
                await _drain(receive)
            raise self._too_large(f"{length} bytes")
        size = SMALL if length is None else length
        gate = self._small if size <= SMALL else self._large
        room = _Room(gate, await gate.ask(size).arrive())
        async with AsyncExitStack() as reading, AsyncExitStack() as undo:
            undo.callback(room.close)
            grow = None if length is not None else partial(self._grow, room, reading)
            data = await self._read(receive, grow)
            undo.pop_all()
        room.ticket.keep(len(data))
        return Body(data, room.ticket)

    async def _grow(self, room: _Room, reading: AsyncExitStack, size: int) -> None:
        """Reserve `size` bytes for a body that continues. Its turn lasts until it is read."""
        if size <= room.ticket.size:
            return
        wanted = min(2 * size, self._limit)
        if room.gate is self._large:
            more = self._large.ask(wanted - room.ticket.size, first=True)
            room.ticket.absorb(await more.arrive())
            return
        await reading.enter_async_context(self._growing)
        ticket = await self._large.ask(wanted).arrive()
        room.close()
        room.gate, room.ticket = self._large, ticket

    def close(self) -> None:
        """End all waits."""
        stopping = EngineUnavailable("the engine is stopping")
        for gate in (self._small, self._large):
            gate.refuse(stopping)

    async def _read(
        self, receive: Receive, grow: Callable[[int], Awaitable[None]] | None
    ) -> bytearray:
        """`grow`: gets the length before more is kept than is reserved."""
        data, values, more = bytearray(), Values(), True
        while more:
            piece, more = await _piece(receive)
            if len(data) + len(piece) > self._limit:
                data.clear()
                await _drain(receive, more)
                raise self._too_large(f"more than {self._limit} bytes")
            if grow is not None:
                await grow(len(data) + len(piece))
            data += piece
            values.take(piece)
            if values.count > MAX_VALUES:
                data.clear()
                await _drain(receive, more)
                raise BodyTooLarge(f"the body has more than {MAX_VALUES} JSON values")
        return data

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body has {size}; this engine takes {self._limit}: send fewer or smaller images"
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
    """The announced length. Raises `BadRequest` if it is not a number."""
    given = headers.get("content-length")
    if given is None or "transfer-encoding" in headers:
        return None
    if not (given.isascii() and given.isdigit()):
        raise BadRequest(f"content-length {given!r} is not a number")
    return int(given)
