"""The leader's end of one follower's connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

from .door import Guest
from .framing import BEAT, LONGEST_BEFORE, Frames
from .messages import Hello, RankFault


class FollowerLink:
    """The connection to a follower, and its state. The watch sets `fault` once."""

    def __init__(self, guest: Guest) -> None:
        self.hello: Hello = guest.hello
        self.fault: RankFault | None = None
        self.sock = guest.sock
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(True)  # a send waits until the watch shuts the connection
        self._frames = Frames(LONGEST_BEFORE)
        self._sending = threading.Lock()
        self._rest = b""

    def send(self, data: bytes) -> bool:
        """Send data. Waits while the follower reads nothing. Returns whether it was sent."""
        try:
            with self._sending:
                self.sock.sendall(self._rest + data)
                self._rest = b""
        except OSError:
            return False
        return True

    def beat(self) -> None:
        """Send a heartbeat, unless a message is being sent or the buffer is full. Never waits."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            data = self._rest + BEAT
            self._rest = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
        except OSError:  # full or closed: the next read shows it
            return
        finally:
            self._sending.release()

    def received(self) -> Iterator[dict[str, Any]]:
        """Received messages. Never waits. Raises `OSError` if it is closed, and `BadFrame`."""
        try:
            data = self.sock.recv(LONGEST_BEFORE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the connection was closed")
        yield from (each for each in self._frames.take(data) if each is not None)

    def shut(self) -> None:
        """Shut down the connection, which wakes waiting threads. Idempotent."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self.shut()
        self.sock.close()
