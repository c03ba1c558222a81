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
    """Bytes to and from a follower, and what is known of it. `fault` is set once, by the watch."""

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
        """Whether it could be sent; waits while the follower reads nothing."""
        try:
            with self._sending:
                self.sock.sendall(self._rest + data)
                self._rest = b""
        except OSError:
            return False
        return True

    def beat(self) -> None:
        """Unless a message is being sent, or there is no room for one; never waits."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            data = self._rest + BEAT
            self._rest = data[self.sock.send(data, socket.MSG_DONTWAIT) :]
        except OSError:  # full, or closed: what comes from the follower tells
            return
        finally:
            self._sending.release()

    def received(self) -> Iterator[dict[str, Any]]:
        """Messages that have come. Raises `OSError` where it is closed, `BadFrame`; never waits."""
        try:
            data = self.sock.recv(LONGEST_BEFORE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the connection was closed")
        yield from (each for each in self._frames.take(data) if each is not None)

    def shut(self) -> None:
        """Wake whoever waits on it. Idempotent."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self.shut()
        self.sock.close()
