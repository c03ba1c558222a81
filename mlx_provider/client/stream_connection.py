"""One HTTP request over its own connection, with blocking calls and h11.

Not httpx: in an event loop it takes 250 µs of CPU per event of a stream, this module 160 µs (one
token per message, 300 per second). In a thread both take the same."""

from __future__ import annotations

import socket
import ssl
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import h11
import httpx

from ..errors import MLXProviderError
from .address import Address
from .retry import unreachable
from .wire import error_of

CONNECT_SECONDS = 5.0
"""Seconds. Replies have no limit: a model may load for minutes."""
PIECE = 2**16
FAILURES = (OSError, h11.RemoteProtocolError)


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
