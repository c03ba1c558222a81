"""A follower's end of the connection to the leader."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from typing import Any

from .framing import LONGEST, Frames

CHUNK = 2**16


class LeaderLink:
    """Bytes to and from the leader.

    A thread that needs a message reads it from the socket itself: another thread would cost two
    changes of the interpreter's lock per message.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.settimeout(None)  # `look` detects a silent leader
        self._frames = Frames(LONGEST)
        self._come: deque[dict[str, Any]] = deque()
        self._reading = threading.Lock()
        self._sending = threading.Lock()
        self._last = time.monotonic()

    def next(self) -> dict[str, Any]:
        """Wait for the next message. Raises `OSError` if it is closed, and `BadFrame`."""
        with self._reading:
            while not self._come:
                self._take(self._sock.recv(CHUNK))
            return self._come.popleft()

    def look(self) -> float:
        """Seconds since the last received bytes, for the thread of heartbeats. Never waits.

        Raises like `next`.
        """
        if self._reading.acquire(blocking=False):  # otherwise the thread in `next` reads
            try:
                self._take(self._sock.recv(CHUNK, socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass
            finally:
                self._reading.release()
        return time.monotonic() - self._last

    def send(self, data: bytes) -> None:
        """Raises `OSError`."""
        with self._sending:
            self._sock.sendall(data)

    def shut(self) -> None:
        """Shut down the connection, which wakes waiting threads. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        self.shut()
        self._sock.close()

    def _take(self, data: bytes) -> None:
        if not data:
            raise ConnectionResetError("the connection was closed")
        self._last = time.monotonic()
        self._come.extend(each for each in self._frames.take(data) if each is not None)
