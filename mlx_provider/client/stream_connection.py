"""One request to an engine over its own connection, with blocking calls and h11. Its address is
`http(s)://host:port` or `unix:/path/to.sock`.

A request is sent again only if no running engine has accepted it: no process listens, the engine
refuses because it is ending, or the connection is lost at once, before any answer. All other
failures end the request.

Not httpx: in an event loop it takes 250 µs of CPU per event of a stream, this module 160 µs (one
token per message, 300 per second). In a thread both take the same."""

from __future__ import annotations

import ipaddress
import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import h11
import httpx
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from .. import __version__
from ..errors import (
    BadRequest,
    EngineDied,
    EngineUnavailable,
    MLXProviderError,
    OtherProtocol,
    Unauthorized,
)
from ..protocol.events import EVENT_BATCH, PROTOCOL_VERSION, ErrorBody, Event
from ..protocol.health import Figures, Health
from ..protocol.requests import ModelRequest

T = TypeVar("T")
PAUSES = (0.0, 0.2, 1.0)
"""Seconds before each further try."""
GOING_DOWN = 0.25
"""Seconds: a connection lost earlier, without an answer, means that the engine was ending."""
CONNECT_SECONDS = 5.0
"""Seconds. Replies have no limit: a model may load for minutes."""
PIECE = 2**16
FAILURES = (OSError, h11.RemoteProtocolError)


@dataclass(frozen=True)
class Address:
    url: str
    """For a unix socket only a label."""
    socket: str | None = None

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.url


def parse_address(api_base: str) -> Address:
    """A trailing `/v1` is ignored. Raises `BadRequest` that names the two forms."""
    if api_base.startswith("unix:"):
        path = api_base.removeprefix("unix:").removeprefix("//")
        if path.startswith("/"):
            return Address("http://engine", path)
    else:
        try:
            url = httpx.URL(api_base)
        except httpx.InvalidURL:
            url = httpx.URL("")
        if url.scheme in ("http", "https") and url.host:
            return Address(api_base.rstrip("/").removesuffix("/v1").rstrip("/"))
    raise BadRequest(
        f"api_base {api_base!r} is neither http(s)://host:port nor unix:/path/to.sock",
        param="api_base",
    )


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class NotTaken(Exception):
    """The engine did not accept the request, which may be sent again."""

    def __init__(self, error: EngineUnavailable) -> None:
        super().__init__(error.message)
        self.error = error


def unreachable(address: Address, error: Exception) -> NotTaken:
    return NotTaken(EngineUnavailable(f"no engine answers at {address}: {error}"))


def refused(error: MLXProviderError) -> Exception:
    """An ending engine uses exactly this class."""
    return NotTaken(error) if type(error) is EngineUnavailable else error


def lost(error: Exception, unanswered: float | None) -> Exception:
    """`unanswered`: seconds since the connection was made. `None`: after an answer."""
    died = EngineDied(f"the engine ended while it held this request: {error}")
    going_down = unanswered is not None and unanswered < GOING_DOWN
    return NotTaken(died) if going_down else died


def patiently(work: Callable[[], T]) -> T:
    """Retry while an engine is ending (a few seconds)."""
    for pause in PAUSES:
        try:
            return work()
        except NotTaken:
            time.sleep(pause)
    return last_try(work)


def last_try(work: Callable[[], T]) -> T:
    try:
        return work()
    except NotTaken as failure:
        raise failure.error from None


def request_body(request: ModelRequest) -> bytes:
    """Raises `BadRequest` if JSON cannot represent it."""
    try:
        return request.__pydantic_serializer__.to_json(request)  # no text beside the bytes
    except (PydanticSerializationError, UnicodeEncodeError) as error:
        raise BadRequest(f"the request cannot be written as JSON: {error}") from None


class EventLines:
    """Splits at newlines only: U+2028 and U+0085 are ordinary characters inside JSON text."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def feed(self, piece: bytes) -> list[Event]:
        """Events whose lines end in this piece. Raises pydantic's `ValidationError`."""
        *ends, rest = piece.split(b"\n")
        if ends:
            ends[0] = b"".join([*self._begun, ends[0]])
            self._begun = []
        self._begun.append(rest)
        return [event for line in ends for event in EVENT_BATCH.validate_json(line)]


def error_of(status: int, path: str, body: bytes) -> MLXProviderError:
    try:
        return ErrorBody.model_validate(json.loads(body)["error"]).exception()
    except (ValueError, KeyError, TypeError):
        message = f"{path} answered {status}: {body[:200]!r}"
    if status == Unauthorized.status:
        return Unauthorized(message)
    return EngineUnavailable(f"no engine of mlx-provider: {message}")


def parse_health(line: bytes) -> Health:
    """Raises `EngineUnavailable` for another protocol."""
    try:
        fields = json.loads(line)
        theirs = int(fields["protocol"])
        version, pid = str(fields["version"]), int(fields["pid"])
    except (ValueError, KeyError, TypeError):
        raise EngineUnavailable(f"no engine of mlx-provider: it sent {line[:200]!r}") from None
    if theirs != PROTOCOL_VERSION:
        raise OtherProtocol(
            f"the engine is mlx-provider {version} (protocol {theirs}), this client is "
            f"{__version__} (protocol {PROTOCOL_VERSION}): end engine process {pid} "
            "so that one of this version starts, or install the same version on both sides"
        )
    try:
        return Health.model_validate(fields)
    except ValidationError as error:
        raise EngineUnavailable(f"the engine's state cannot be read: {error}") from None


def parse_figures(line: bytes) -> Figures:
    """Raises `EngineUnavailable` if it has no figures."""
    try:
        return Figures.model_validate_json(line)
    except ValidationError as error:
        raise EngineUnavailable(f"the engine's figures cannot be read: {error}") from None


@dataclass(frozen=True)
class Endpoint:
    address: Address
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None = None

    def connect(self) -> StreamConnection:
        """Raises `NotTaken` if no process listens."""
        try:
            connection = _connected(self.address)
            if self.tls is not None:
                host = httpx.URL(self.address.url).host
                connection = self.tls.wrap_socket(connection, server_hostname=host)
            connection.settimeout(None)
        except OSError as error:
            raise unreachable(self.address, error) from None
        return StreamConnection(connection, self)


class StreamConnection:
    def __init__(self, connection: socket.socket, endpoint: Endpoint) -> None:
        self.socket = connection
        self.status = 0
        self._endpoint = endpoint
        self._http = h11.Connection(h11.CLIENT)
        self._began = time.monotonic()
        self._path = ""

    @property
    def unanswered(self) -> float | None:
        """Seconds so far. `None`: answered."""
        return None if self.status else time.monotonic() - self._began

    def request(self, method: str, path: str, body: bytes = b"") -> None:
        """Returns after the head of the reply."""
        self._path = path
        self._send(self._head(method, path, len(body)), body)
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                return
            if event is h11.NEED_DATA:
                self._http.receive_data(self.socket.recv(PIECE))
            elif not isinstance(event, h11.InformationalResponse):
                raise h11.RemoteProtocolError("the reply was cut off")

    def pieces(self) -> Iterator[bytes]:
        """The body as it arrives. Raises one of `FAILURES` if it is cut off."""
        piece, ended = self._body()
        while not ended:
            yield piece
            piece, ended = self.received(self.socket.recv(PIECE))
        yield piece

    def error(self) -> MLXProviderError:
        body = bytearray()
        with suppress(*FAILURES):
            for piece in self.pieces():
                body += piece
        return error_of(self.status, self._path, bytes(body))

    def received(self, data: bytes) -> tuple[bytes, bool]:
        """New bytes of the body, and whether it has ended. `data`: bytes of the connection; empty
        if the engine has closed it. Raises `h11.RemoteProtocolError` for a body that is cut off,
        and for data that is not HTTP."""
        self._http.receive_data(data)
        return self._body()

    def shut(self) -> None:
        """End a connection that another thread reads and then closes. Not TLS's own `shutdown`,
        after which that thread would read encrypted data."""
        with suppress(OSError):  # the engine was first
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()

    def _body(self) -> tuple[bytes, bool]:
        pieces = []
        while isinstance(event := self._http.next_event(), h11.Data):
            pieces.append(bytes(event.data))
        return b"".join(pieces), event is not h11.NEED_DATA

    def _send(self, head: h11.Request, body: bytes) -> None:
        """An engine that refuses a request may not read all of it; its answer gives the reason."""
        with suppress(OSError):
            self.socket.sendall(self._http.send(head) or b"")
            self.socket.sendall(self._http.send(h11.Data(data=body)) or b"")
            self._http.send(h11.EndOfMessage())

    def _head(self, method: str, path: str, length: int) -> h11.Request:
        url = httpx.URL(self._endpoint.address.url)
        own = {
            "host": url.netloc.decode(),
            "content-type": "application/json",
            "content-length": str(length),
            "connection": "close",
        }
        target = url.raw_path.rstrip(b"/") + path.encode()
        headers = list({**own, **self._endpoint.headers}.items())
        return h11.Request(method=method, target=target, headers=headers)


def _connected(address: Address) -> socket.socket:
    if address.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(address.socket)
        except OSError:
            connection.close()
            raise
        return connection
    url = httpx.URL(address.url)
    port = url.port or (443 if url.scheme == "https" else 80)
    connection = socket.create_connection((url.host, port), CONNECT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _notice_a_lost_machine(connection)
    return connection


def _notice_a_lost_machine(connection: socket.socket) -> None:
    """Detect within half a minute that the engine's machine has left the network."""
    if sys.platform == "darwin":
        idle = socket.TCP_KEEPALIVE
    else:
        idle = socket.TCP_KEEPIDLE
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((idle, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
