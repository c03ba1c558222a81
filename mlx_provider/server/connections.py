"""The listening sockets of an engine process (on TCP, or a unix socket for processes of its owner
alone), and the limits of their connections. Each connection is an open file, whose number is
limited: a connection that occupies a place without using it is closed.

uvicorn does not limit the time of a request's head or body, nor that of a reader, and its limit of
connections only answers 503. This adapter adds these limits to `H11Protocol` and `ServerState` as
they are in uvicorn 0.33 to 0.54 (`protocols/http/h11_impl.py`, `server.py`). It relies on the calls
of `connection_made`, `data_received`, `on_response_complete` and `connection_lost`, and on the
attributes `app_state`, `cycle`, `flow`, `transport`, `timeout_keep_alive_task` and `connections`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import stat
import struct
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ..errors import EngineUnavailable, Overloaded
from .access import SCOPE_CONNECTION, error_response

LEAST_FILES = 48  # open files for the engine, a model, and a few connections
WANTED = 2048  # open files
log = logging.getLogger(__name__)
FULL = "the engine has too many connections: try again"
ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts in one turn. About four times as many may be open before the
first is closed here: if no file can be opened, asyncio (CPython 3.11, `selector_events.py`,
`_accept_connection`) logs as many tracebacks per second."""
LINGERING = 32
"""Refused connections that stay open for their clients to read the reason: closing a connection
with unread bytes resets it, and the answer is lost."""


def open_files() -> int:
    """How many files this process may open now. Importing mlx-lm (0.32, utils.py) changes it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raise the limit of open files to `WANTED`, or as far as allowed. Raises `EngineUnavailable`
    if that is below `LEAST_FILES`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if most < LEAST_FILES:
        problem = f"this process may open {most} files and needs {LEAST_FILES}"
        raise EngineUnavailable(f"{problem}: start it under `ulimit -n {WANTED}`")
    if open_files() < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def accepted_at_once() -> int:
    """`ACCEPTED_AT_ONCE`, or fewer where few files may be open."""
    return max(1, min(ACCEPTED_AT_ONCE, open_files() // 16))


@dataclass(frozen=True)
class ConnectionLimits:
    """Times in seconds. They pass only while the event loop runs, so delays of a busy engine do not
    count against its clients."""

    arrival: float = 20.0  # for the head of a request, and again for its body
    rate: int = 2**14  # bytes that extend this time by one second
    slow_body: float = 2.0  # after which a connection may be closed for others during a body
    unread: float = 600.0  # in which a reader must read something
    connections: int = 1024  # that may be open; never more than half of the possible open files
    tick: float = 1.0  # between two checks


class WatchedState(ServerState):
    """uvicorn's state, and the choice which connection is closed for a new one.

    A connection with an unfinished reply (as an attached client's) is never closed. So each named
    key has at most as many connections in use as are left for all others: half stay free beside one
    such key, a third beside two. The operator has no limit."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__()
        self.limits = limits
        self._parts: dict[WatchedProtocol, str] = {}
        """`WatchedProtocol.part` of connections that may be closed, the oldest first."""
        self._refused: dict[WatchedProtocol, None] = {}

    def enter(self, protocol: WatchedProtocol) -> None:
        """Add a new connection. If there are too many, it replaces another one, or is refused."""
        self.move(protocol)
        if len(self.connections) <= self._most():
            return
        victim = next(self._least_useful(), None)
        if victim is not None:
            self._drop(victim)
            return
        self.leave(protocol)
        self._refused[protocol] = None
        protocol.refuse()
        if len(self._refused) > min(LINGERING, open_files() // 8):
            self._drop(next(iter(self._refused)))

    def admits(self, owner: str) -> bool:
        """Whether the named key `owner` may use one more connection."""
        used = [p for p in self._all_watched() if p.owner is not None and p.in_use]
        return sum(p.owner == owner for p in used) < self._most() - len(used)

    def move(self, protocol: WatchedProtocol) -> None:
        """Called when a connection may have begun or ended a request. A new part makes it the
        newest one. Within one part, it keeps its place whatever it sends."""
        part = protocol.part
        if self._parts.get(protocol) != part:
            self._parts.pop(protocol, None)
            if part is not None:
                self._parts[protocol] = part

    def leave(self, protocol: WatchedProtocol) -> None:
        """Forget a connection that is closed."""
        self._parts.pop(protocol, None)
        self._refused.pop(protocol, None)
        self.connections.discard(protocol)

    def tick(self, seconds: float) -> None:
        """Close connections that are out of time, `seconds` after the last call."""
        late = [protocol for protocol in self._all_watched() if protocol.is_late(seconds)]
        for protocol in late:
            self._drop(protocol)
        if late:
            log.info("%d inactive connections were closed", len(late))

    def drop_all(self) -> None:
        """Close all connections at once, without their last bytes."""
        for protocol in self._all_watched():
            self._drop(protocol)

    def _drop(self, protocol: WatchedProtocol) -> None:
        self.leave(protocol)
        protocol.transport.abort()

    def _all_watched(self) -> list[WatchedProtocol]:
        open_ones = [p for p in self.connections if isinstance(p, WatchedProtocol)]
        return [*open_ones, *self._refused]

    def _least_useful(self) -> Iterator[WatchedProtocol]:
        silent = [protocol for protocol, part in self._parts.items() if part == "silent"]
        if len(silent) > 1:  # the newest one is the one that needs a place
            yield silent[0]
        yield from (p for p, part in self._parts.items() if part == "idle" and not p.in_use)
        slow = self.limits.slow_body
        yield from (p for p, part in self._parts.items() if part == "body" and p.seconds >= slow)

    def _most(self) -> int:
        return min(self.limits.connections, max(1, open_files() // 2 - 2 * accepted_at_once()))


class WatchedProtocol(H11Protocol):
    """One connection, with what it does now and how long its client has kept it waiting."""

    server_state: WatchedState

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.app_state = {SCOPE_CONNECTION: weakref.ref(self)}
        self.owner: str | None = None  # of its present or last request; `None`: none was admitted
        self.seconds = 0.0  # since the expected head or body began
        self._received = 0  # bytes in that time
        self._refused = False
        self._awaited: tuple[object, str | None] | None = None  # at the last check
        self._unread = 0  # bytes at the last check
        self._stuck = 0.0  # seconds in which the client has read nothing

    @property
    def part(self) -> str | None:
        """What the client does: `silent` before its first request, `idle` between two, or it sends
        the `body` of one. `None`: it waits for a reply."""
        if self.cycle is None:
            return "silent"
        if self.cycle.response_complete:
            return "idle"
        return "body" if self.cycle.more_body else None

    @property
    def in_use(self) -> bool:
        """A request has begun, or its reply is not read completely."""
        return self.part in ("body", None) or bool(self.transport.get_write_buffer_size())

    def admit(self, owner: str) -> None:
        """Called for each request with a key. `owner`: its name; "" for the operator's. Raises
        `Overloaded` if the key has too many connections."""
        self.owner = None
        if owner and not self.server_state.admits(owner):
            raise Overloaded(FULL)
        self.owner = owner

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.server_state.enter(self)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._received += len(data)
            super().data_received(data)
            self._move()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._move()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.leave(self)
        super().connection_lost(exc)

    def refuse(self) -> None:
        """Answer that there are too many connections, before any request."""
        self._refused = True
        error = Overloaded(FULL)
        answer = error_response(error, {"connection": "close"})
        head = b"".join(b"%b: %b\r\n" % field for field in answer.raw_headers)
        line = b"HTTP/1.1 %d Too Many Requests\r\n" % error.status
        self.transport.write(line + head + b"\r\n" + bytes(answer.body))
        self.transport.write_eof()

    def is_late(self, seconds: float) -> bool:
        """Whether its client is out of time. `seconds`: since the last check."""
        awaited = self._await_next()
        if awaited is None or awaited != self._awaited:
            self._awaited, self.seconds, self._received = awaited, 0.0, 0
        else:
            self.seconds += seconds
        unread = self.transport.get_write_buffer_size()
        self._stuck = self._stuck + seconds if unread and unread == self._unread else 0.0
        self._unread, limits = unread, self.server_state.limits
        allowed = limits.arrival + self._received / limits.rate
        return self.seconds > allowed or self._stuck > limits.unread

    def _move(self) -> None:
        if not self.transport.is_closing():
            self.server_state.move(self)

    def _await_next(self) -> tuple[object, str | None] | None:
        """What the client must send next: the head after a request, or its body."""
        part = self.part
        if part == "body":
            return None if self.flow.read_paused else (self.cycle, part)
        # uvicorn's own timer runs from a reply to the next byte
        return (self.cycle, part) if part and self.timeout_keep_alive_task is None else None


# -- listening sockets

# from <sys/un.h> of macOS; Python defines neither
SOL_LOCAL, LOCAL_PEERCRED = 0, 1
BACKLOG = 2048


class OwnerSocket(socket.socket):
    """Accepts processes of this user and of root. Does not depend on the modes of socket and
    folder, because requests over it may run code."""

    def accept(self) -> tuple[socket.socket, object]:
        """Raises `ConnectionAbortedError` for another user's connection; asyncio then accepts the
        next one (3.11, `selector_events._accept_connection`)."""
        connection, address = super().accept()
        peer = peer_uid(connection)
        if peer in (0, os.getuid()):
            return connection, address
        connection.close()
        log.warning("a process of user %s was refused at the engine's socket", peer)
        raise ConnectionAbortedError("the process belongs to another user")


def peer_uid(connection: socket.socket) -> int | None:
    """User of the process at the other end; `None`: unknown."""
    with suppress(OSError, struct.error):
        if sys.platform == "darwin":
            credentials = connection.getsockopt(SOL_LOCAL, LOCAL_PEERCRED, 76)
            return int(struct.unpack_from("=II", credentials)[1])
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[1])
    return None


@dataclass(frozen=True)
class Listener:
    socket: socket.socket
    address: str  # `unix:/path` or `http://host:port`, as a client's `api_base`
    path: Path | None = None  # of the socket file; `None`: TCP
    identity: tuple[int, int] | None = None  # device and inode of this file

    def findable(self) -> bool:
        """Whether clients still find it: its socket file is not gone or replaced."""
        return self.path is None or _identity(self.path) == self.identity

    def remove(self) -> None:
        """Delete its socket file, never one that has replaced it."""
        if self.path is not None and self.findable():
            self.path.unlink(missing_ok=True)


def listen_unix(path: Path) -> Listener:
    """Listen for processes of the owner. The caller has the engine lock, so a socket that exists is
    stale and is replaced. Raises `EngineUnavailable` if another file is there."""
    if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
        raise EngineUnavailable(f"{path} is not a socket: remove it")
    path.unlink(missing_ok=True)
    listener = OwnerSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    return Listener(listener, f"unix:{path}", path, _identity(path))


def listen_tcp(host: str, port: int) -> Listener:
    """Port 0: any that is free. Raises `EngineUnavailable` that names the port and the remedy."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise EngineUnavailable(f"host {host!r} is not an address: {error.strerror}") from None
    # asyncio disables Nagle's delay (40 ms per reply) only if the protocol is given
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = f"cannot listen on port {port} of {host}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} on {host} is in use: choose another with --port"
        raise EngineUnavailable(why) from None
    name = f"[{host}]" if ":" in host else host
    return Listener(listener, f"http://{name}:{listener.getsockname()[1]}")


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.lstat()
        return status.st_dev, status.st_ino
    return None
