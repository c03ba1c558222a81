"""Connections of one client: a control connection by which client and engine detect each other's
end, and one per request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakSet

import h11
from pydantic import ValidationError

from ..errors import EngineUnavailable
from ..protocol.events import Accepted
from ..protocol.health import Health
from .generation import Generation, ReplyEvents
from .stream_connection import (
    FAILURES,
    Endpoint,
    EventLines,
    NotTaken,
    StreamConnection,
    lost,
    parse_health,
    refused,
)

ATTACH_SECONDS = 60.0


@dataclass
class Held:
    """A long-lived connection by which engine and client each detect the other's end."""

    connection: StreamConnection
    gone: threading.Event = field(default_factory=threading.Event, kw_only=True)
    """Set when either side has ended it."""

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._watch, name="mlx-provider client", daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.gone.set()
        self.connection.shut()

    def _watch(self) -> None:
        with suppress(*FAILURES):
            for _ in self.connection.pieces():
                pass
        self.gone.set()
        self.connection.close()


@dataclass
class Attachment(Held):
    """The engine counts its client until it ends."""

    health: Health


class ControlConnection:
    """Connects at the first call. Public methods are safe from any thread."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.attaching = threading.Lock()
        self.attachment: Attachment | None = None
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._closed = False
        self._open: WeakSet[StreamConnection] = WeakSet()
        self._replies: WeakSet[ReplyEvents] = WeakSet()

    def attach(self) -> Attachment:
        """Raises `NotTaken` if no process listens."""
        connection = self._asked("GET", "/v1/attach", seconds=ATTACH_SECONDS)
        with self._guarded(connection):
            line = next(_lines(connection), b"")
            connection.socket.settimeout(None)
            self.attachment = Attachment(connection, parse_health(line))
        return self.attachment

    def open_door(self, body: bytes) -> tuple[str, Held]:
        """The listener's URL, and the connection that keeps it open. Raises typed errors."""
        connection = self._asked("POST", "/v1/door", body)
        with self._guarded(connection):
            if not (url := next(_lines(connection), b"")):
                raise h11.RemoteProtocolError("the reply was cut off")
            return url.decode(), Held(connection)

    def send(self, path: str, body: bytes) -> Generation:
        """Wait until the request is accepted. Raises typed errors and `NotTaken`."""
        connection = self._asked("POST", path, body)
        with self._guarded(connection):
            lines = EventLines()
            events = next((e for piece in connection.pieces() if (e := lines.feed(piece))), [])
            if not events or not isinstance(events[0], Accepted):
                raise EngineUnavailable("the engine's first event is not 'accepted'")
            reply = ReplyEvents(connection, lines, events[1:])
            with self._lock:
                self._refuse_closed()
                self._open.discard(connection)
                self._replies.add(reply)
        return Generation(events[0], reply, reply.close)

    def ask(self, method: str, path: str, ok: tuple[int, ...] = (200,), body: bytes = b"") -> bytes:
        """One short request. Raises typed errors and `NotTaken`."""
        connection = self._asked(method, path, body, ok)
        with self._guarded(connection):
            answer = b"".join(connection.pieces())
        connection.close()
        return answer

    def lines(self, path: str) -> Iterator[bytes]:
        """Lines of a streamed reply, without newlines. Reading raises typed errors."""
        try:
            connection = self._asked("GET", path)
        except NotTaken as failure:
            raise failure.error from None
        with self._guarded(connection):
            yield from _lines(connection)
        connection.close()

    def close(self) -> None:
        """Ends every request. Idempotent."""
        with self._lock:
            self._closed = True
            connections, replies = list(self._open), list(self._replies)
        for connection in connections:
            connection.shut()
        for reply in replies:
            reply.close()
        if self.attachment is not None:
            self.attachment.thread.join()

    def _asked(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        ok: tuple[int, ...] = (200,),
        seconds: float | None = None,
    ) -> StreamConnection:
        """Returns after a successful reply head. `seconds`: limit of each wait."""
        with self._lock:
            self._refuse_closed()
        connection = self._endpoint.connect()
        with self._guarded(connection):
            with self._lock:
                self._refuse_closed()
                self._open.add(connection)
            connection.socket.settimeout(seconds)
            connection.request(method, path, body)
            if connection.status not in ok:
                raise refused(connection.error())
        return connection

    @contextmanager
    def _guarded(self, connection: StreamConnection) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            connection.close()
            if self._closed and isinstance(error, Exception):
                self._refuse_closed()
            if isinstance(error, TimeoutError) and connection.socket.gettimeout():
                raise EngineUnavailable(
                    f"the engine at {self._endpoint.address} did not answer within "
                    f"{ATTACH_SECONDS:g} s"
                ) from None
            if isinstance(error, FAILURES):
                raise lost(error, connection.unanswered) from None
            if isinstance(error, ValidationError):
                raise EngineUnavailable(f"the engine's events cannot be read: {error}") from None
            raise

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineUnavailable("this client was closed")


def _lines(connection: StreamConnection) -> Iterator[bytes]:
    begun = b""
    for piece in connection.pieces():
        *whole, begun = (begun + piece).split(b"\n")
        yield from whole
