"""One request over a connection of its own, up to the events of its reply.

Its thread waits for the reply by itself, and whoever reads the events reads them from the socket:
httpx 0.28 over anyio takes a tenth of a millisecond of the processor for each piece of a stream,
and a thread between reader and socket as much again. HTTP itself is h11's.
"""

from __future__ import annotations

import socket
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakSet

import h11
import httpx
from pydantic import ValidationError

from ..errors import EngineUnavailable, MLXProviderError
from ..protocol.events import Accepted
from .address import Address
from .io_thread import client_closed
from .reply_events import PIECE, Begin, ReplyEvents, shut
from .retry import NotTaken, lost, refused, unreachable
from .wire import EventLines, error_of

CONNECT_LIMIT = 5.0
"""Seconds for a connection to be made; replies have no limit, a model may load for minutes."""
FAILURES = (OSError, h11.RemoteProtocolError)
"""What a broken connection raises."""


@dataclass(frozen=True)
class Post:
    """A body on its way to an engine, and how to get there."""

    address: Address
    path: str
    headers: Mapping[str, str]
    body: bytes
    tls: ssl.SSLContext | None
    begin: Begin

    def connected(self) -> socket.socket:
        """A new connection. Raises `NotTaken` where nobody listens."""
        try:
            connection = _connection(self.address)
            if self.tls is not None:
                host = httpx.URL(self.address.url).host
                connection = self.tls.wrap_socket(connection, server_hostname=host)
            connection.settimeout(None)
        except OSError as error:
            raise unreachable(self.address, error) from None
        return connection

    def exchanged(self, connection: socket.socket) -> tuple[Accepted, ReplyEvents]:
        """Send it, wait until it is accepted; the rest of the reply is the reader's.

        Raises the engine's typed error, `NotTaken`, `EngineDied`.
        """
        reply = Reply(connection)
        lines = EventLines()
        try:
            reply.send(self._head(), self.body)
            if reply.head().status_code != 200:
                raise refused(error_of(reply.status, self.path, reply.whole()))
            while not (events := lines.feed(reply.more())):
                pass
        except FAILURES as error:
            raise lost(error, reply.unanswered) from None
        except ValidationError as error:
            raise EngineUnavailable(f"the engine's events cannot be read: {error}") from None
        first, *rest = events
        if not isinstance(first, Accepted):
            raise EngineUnavailable(f"the engine's first event is {first.type!r}, not 'accepted'")
        return first, ReplyEvents(connection, reply.decoded, lines, rest, self.begin)

    def _head(self) -> h11.Request:
        url = httpx.URL(self.address.url)
        own = {
            "host": url.netloc.decode(),
            "content-type": "application/json",
            "content-length": str(len(self.body)),
            "connection": "close",
        }
        target = url.raw_path.rstrip(b"/") + self.path.encode()
        return h11.Request(
            method="POST", target=target, headers=list({**own, **self.headers}.items())
        )


class Exchanges:
    """Those of one client, which end with it. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: set[socket.socket] = set()
        self._replies: WeakSet[ReplyEvents] = WeakSet()

    def run(self, post: Post) -> tuple[Accepted, ReplyEvents]:
        """`Post.exchanged` over a new connection. Raises `EngineUnavailable` once closed."""
        connection = post.connected()
        with ExitStack() as undo:
            undo.callback(connection.close)
            try:
                self._keep(self._waiting, connection)
                accepted, events = post.exchanged(connection)
                self._keep(self._replies, events)
            except (MLXProviderError, NotTaken):
                if self._closed:
                    raise client_closed() from None
                raise
            finally:
                self._waiting.discard(connection)
            undo.pop_all()
        return accepted, events

    def close(self) -> None:
        """End all; nothing begins any more."""
        with self._lock:
            self._closed = True
            waiting, replies = list(self._waiting), list(self._replies)
        for connection in waiting:
            shut(connection)
        for events in replies:
            events.close()

    def _keep(self, among: set[Any] | WeakSet[Any], one: object) -> None:
        with self._lock:
            if self._closed:
                raise client_closed()
            among.add(one)


class Reply:
    """The reply that comes over a connection, blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._http = h11.Connection(h11.CLIENT)
        self._began = time.monotonic()
        self.status = 0
        """Known once there is a head."""

    @property
    def unanswered(self) -> float | None:
        """Seconds without an answer so far; `None` where there was one."""
        return None if self.status else time.monotonic() - self._began

    def send(self, head: h11.Request, body: bytes) -> None:
        """Whoever refuses a request may not read it to its end: the answer tells."""
        try:
            self._connection.sendall(self._http.send(head) or b"")
            self._connection.sendall(self._http.send(h11.Data(data=body)) or b"")
        except OSError:
            return
        self._http.send(h11.EndOfMessage())

    def head(self) -> h11.Response:
        """Wait for it; what an engine tells before is of no interest."""
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                return event
            if event is h11.NEED_DATA:
                self._http.receive_data(self._connection.recv(PIECE))
            elif not isinstance(event, h11.InformationalResponse):
                _cut()

    def more(self) -> bytes:
        """Wait for the next piece of its body. Raises where it ended."""
        piece, ended = self.decoded(b"")
        while not piece:
            if ended:
                _cut()
            data = self._connection.recv(PIECE)
            piece, ended = self.decoded(data) if data else (b"", True)
        return piece

    def whole(self) -> bytes:
        """Its body to the end; a connection that is lost first ends it."""
        pieces = []
        try:
            while True:
                pieces.append(self.more())
        except FAILURES:
            return b"".join(pieces)

    def decoded(self, data: bytes) -> tuple[bytes, bool]:
        """What bytes of the connection say of the body, and whether that was its end.

        Raises `h11.RemoteProtocolError` for what is no HTTP.
        """
        if data:
            self._http.receive_data(data)
        pieces = []
        while isinstance(event := self._http.next_event(), h11.Data):
            pieces.append(bytes(event.data))
        return b"".join(pieces), event is not h11.NEED_DATA


def keepalive_options() -> list[tuple[int, int, int]]:
    """Notice within half a minute that an engine's machine has vanished from the network."""
    if sys.platform == "darwin":
        idle = socket.TCP_KEEPALIVE
    else:
        idle = socket.TCP_KEEPIDLE
    return [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, idle, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    ]


def _connection(address: Address) -> socket.socket:
    if address.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_LIMIT)
        try:
            connection.connect(address.socket)
        except OSError:
            connection.close()
            raise
        return connection
    url = httpx.URL(address.url)
    port = url.port or (443 if url.scheme == "https" else 80)
    connection = socket.create_connection((url.host, port), CONNECT_LIMIT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in keepalive_options():
        connection.setsockopt(*option)
    return connection


def _cut() -> NoReturn:
    raise h11.RemoteProtocolError("the reply was cut off")
