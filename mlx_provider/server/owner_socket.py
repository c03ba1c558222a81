"""A unix socket for processes of its owner alone."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys

log = logging.getLogger(__name__)

# from <sys/un.h> of macOS; Python defines neither
SOL_LOCAL, LOCAL_PEERCRED = 0, 1


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
    """`None`: unknown."""
    try:
        if sys.platform == "darwin":
            credentials = connection.getsockopt(SOL_LOCAL, LOCAL_PEERCRED, 76)
            return int(struct.unpack_from("=II", credentials)[1])
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("3i", credentials)[1])
    except (OSError, struct.error):
        return None
