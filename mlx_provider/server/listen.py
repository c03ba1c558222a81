"""The listening sockets of an engine process (on TCP, or a unix socket for processes of its owner
alone)."""

import errno
import logging
import os
import socket
import stat
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import EngineUnavailable

log = logging.getLogger(__name__)

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
    address: str
    """`unix:/path` or `http://host:port`, as a client's `api_base`."""
    path: Path | None = None
    identity: tuple[int, int] | None = None

    def findable(self) -> bool:
        return self.path is None or _identity(self.path) == self.identity

    def remove(self) -> None:
        if self.path is not None and self.findable():
            self.path.unlink(missing_ok=True)


def listen_unix(path: Path) -> Listener:
    """Owner-only. Replaces a stale socket: the caller holds the engine lock, so an existing one has
    no owner."""
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
    """Port 0: any. Raises `EngineUnavailable` that names the port and the remedy."""
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
