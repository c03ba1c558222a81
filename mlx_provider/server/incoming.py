"""Reads requests within limits of bytes, values and time, parses them, and marks their origin. Work
on one request that would keep the event loop waiting runs in threads."""

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from ..bounds import ValueCounter
from ..byte_gate import ByteGate, Ticket
from ..errors import (
    BadRequest,
    BodyTooLarge,
    EngineUnavailable,
    MLXProviderError,
    RequestTimedOut,
    for_another,
)
from ..invalid import bad_request, quote
from ..protocol.events import EVENT_BATCH, Event
from ..protocol.requests import ModelOptions, ModelRequest
from ..wire import ROUTES
from ..wire.api import ParsedRequest
from .access import key_name
from .handover import Activity

T = TypeVar("T")
Q = TypeVar("Q", bound=ModelRequest)
NDJSON = "application/x-ndjson"
SMALL = 2**20  # bytes of the largest body that does not wait behind large ones
SMALL_ROOM = 64 * 2**20  # bytes of small bodies, shared among keys (`ByteGate`)
PARSED_AT_ONCE = 2  # bodies that are parsed in threads, shared likewise
MAX_VALUES = 2**21
"""JSON values of one body. Each takes a hundred bytes once parsed, but perhaps 3 in the body."""
SILENCE = 60.0  # seconds without a byte until a body is abandoned
DRAIN_SECONDS = 5.0
"""Seconds for discarding the rest of a body that is too large. Closing a connection with unread
bytes resets it, and the answer is lost."""
AT_ONCE = 2**16  # bytes that are parsed faster than a thread starts
THREADS = 1024  # requests that are prepared at once; most of these threads wait


async def in_thread(
    call: Callable[[], T],
    limiter: anyio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """The result of the call. Raises its `MLXProviderError` without frames, which hold the request:
    `run_sync` (anyio 4.16) keeps a reference cycle, and an idle engine collects no garbage."""
    outcome = await anyio.to_thread.run_sync(
        partial(_outcome, call), limiter=limiter, abandon_on_cancel=abandon_on_cancel
    )
    if isinstance(outcome, MLXProviderError):
        raise for_another(outcome)
    return outcome


def _outcome(call: Callable[[], T]) -> T | MLXProviderError:
    try:
        return call()
    except MLXProviderError as error:
        return for_another(error)


class Lines:
    """The `api.ResponseWriter` of the engine's own routes: one line for each list of events."""

    media_type = NDJSON
    heartbeat = b""
    streamed = True

    def feed(self, events: Sequence[Event]) -> bytes:
        return EVENT_BATCH.dump_json(list(events)) + b"\n"


@dataclass
class Body:
    data: bytearray
    ticket: Ticket  # for the bytes of `data`


class Bodies:
    """Shares the bytes of bodies among keys. A body counts with its bytes so far and waits only for
    others of its key. The oldest of a key never waits, so the sum may exceed the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.large = ByteGate(limit)
        self.small = ByteGate(SMALL_ROOM)
        self.parsing = ByteGate(PARSED_AT_ONCE)

    async def read(self, scope: Scope, receive: Receive) -> Body:
        """A request's body, whose ticket the caller must close. Raises `BodyTooLarge`,
        `RequestTimedOut`, `BadRequest`, `ClientDisconnect`."""
        headers = Headers(scope=scope)
        length = _length(headers)
        if length is not None and length > self._limit:
            if "expect" not in headers:
                await _drain(receive)
            raise self._too_large(f"{length} bytes")
        gate = self.small if (length or 0) <= SMALL else self.large
        body = Body(bytearray(), gate.ask(0, key_name(scope)))
        try:
            await self._read(body, receive)
        except BaseException:  # a cancellation, too
            body.ticket.close()
            raise
        return body

    async def _charge(self, ticket: Ticket, size: int) -> Ticket:
        """Wait for the bytes of a body that has grown to `size`."""
        if size <= SMALL or ticket.gate is self.large:
            return await ticket.grow(size)
        larger = await self.large.ask(size, ticket.owner).arrive()
        ticket.close()
        return larger

    def close(self) -> None:
        """Refuse all bodies that wait for bytes."""
        stopping = EngineUnavailable("the engine is stopping")
        for gate in (self.small, self.large, self.parsing):
            gate.refuse(stopping)

    async def _read(self, body: Body, receive: Receive) -> None:
        data, values, more = body.data, ValueCounter(), True
        while more:
            piece, more = await _piece(receive)
            size, error = len(data) + len(piece), None
            if size > self._limit:
                error = self._too_large(f"more than {self._limit} bytes")
            else:
                body.ticket = await self._charge(body.ticket, size)
                data += piece
                values.take(piece)
                if values.count > MAX_VALUES:
                    error = BodyTooLarge(f"the body has more than {MAX_VALUES} JSON values")
            if error is not None:
                data.clear()
                await _drain(receive, more)
                raise error

    def _too_large(self, size: str) -> BodyTooLarge:
        remedy = "send fewer or smaller images"
        return BodyTooLarge(f"the body has {size}; this engine takes {self._limit}: {remedy}")


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
    given = headers.get("content-length")
    if given is None or "transfer-encoding" in headers:
        return None
    if not (given.isascii() and given.isdigit()):
        raise BadRequest(f"content-length {given!r} is not a number")
    return int(given)


SenderFields = Callable[[str | None], dict[str, Any]]
"""From the salt in the request: the fields that a client cannot choose."""
Parse = Callable[[SenderFields, bytearray], ParsedRequest]


@dataclass(frozen=True)
class Incoming:  # reads the requests of one listener
    activity: Activity
    bodies: Bodies
    sender_fields: Callable[[Scope, str | None], dict[str, Any]]  # `SenderFields` for a scope
    admit: Callable[[Scope], None]  # raises if the engine takes no more requests
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(THREADS))

    async def read(
        self, scope: Scope, receive: Receive, parse: Parse
    ) -> tuple[ParsedRequest, Ticket]:
        """The parsed body, and its ticket, which the caller must close. The caller must count the
        request (`Activity.serving`) before its next `await`, or the engine may end. Raises the
        errors of `parse`, `Bodies.read` and `admit`."""
        with ExitStack() as undo:
            with self.activity.attach():  # may take longer than the idle limit
                body = await self.bodies.read(scope, receive)
                undo.callback(body.ticket.close)
                parsed = await self._parse(partial(parse, partial(self.sender_fields, scope)), body)
            self.admit(scope)
            undo.pop_all()
        return parsed, body.ticket

    async def _parse(self, parse: Callable[[bytearray], T], body: Body) -> T:
        if len(body.data) <= AT_ONCE:
            return parse(body.data)
        with await self.bodies.parsing.ask(1, body.ticket.owner).arrive():
            return await in_thread(partial(parse, body.data))


def engine_parser(kind: type[ModelRequest]) -> Parse:  # for our own routes
    def parse(fields_of: SenderFields, body: bytearray) -> ParsedRequest:
        request = parse_request(kind, body)
        marked = request.model_copy(update=fields_of(request.salt))
        return ParsedRequest([marked], lambda accepted: Lines(), joined=False)

    return parse


def api_parser(path: str) -> Parse:  # for the routes of other APIs
    def parse(fields_of: SenderFields, body: bytearray) -> ParsedRequest:
        value = _json(body)
        if not isinstance(value, dict):
            raise BadRequest(f"body: must be an object, got {quote(value)}")
        fields = {"model": value.get("model"), "options": ModelOptions(), **fields_of(None)}
        return ROUTES[path](value, fields)

    return parse


def parse_request(kind: type[Q], body: bytes | bytearray) -> Q:
    """Raises `BadRequest` for a body that is not a `kind`."""
    try:
        return kind.model_validate(_json(body))
    except ValidationError as error:
        raise bad_request(error, kind) from None


def _json(body: bytes | bytearray) -> object:
    """The JSON value, not yet validated. Garbage collection is off meanwhile, because a million
    objects would trigger it a dozen times."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return from_json(body)
    except ValueError as error:
        raise BadRequest(f"body: Invalid JSON: {error}") from None
    finally:
        if collects:
            gc.enable()
