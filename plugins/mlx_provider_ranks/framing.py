"""Messages on a socket: four bytes of length, then JSON. An empty one is a heartbeat."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json, to_json

from mlx_provider.errors import BodyTooLarge

LONGEST = 2**28
"""Bytes of a message from the leader: a joining request brings its token ids."""
LONGEST_BEFORE = 2**16
"""Bytes of a message from who has not shown the key yet, and of any from a follower."""
BEAT = struct.pack(">I", 0)


class BadFrame(Exception):
    """The received bytes are not a message."""


def frame(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message. Raises `BodyTooLarge` if it is too long for a follower."""
    body = to_json(message)
    if len(body) > LONGEST:
        raise BodyTooLarge(f"a message of {len(body)} bytes to ranks; {LONGEST} at most")
    return struct.pack(">I", len(body)) + body


class Frames:
    """Splits received bytes into messages; `None` for a heartbeat."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._held = bytearray()

    def take(self, data: bytes) -> Iterator[dict[str, Any] | None]:
        """Raises `BadFrame` for an invalid message before its bytes are stored."""
        self._held += data
        start = 0
        while len(self._held) - start >= 4:
            (length,) = struct.unpack_from(">I", self._held, start)
            if length > self._longest:
                raise BadFrame(f"a message of {length} bytes; {self._longest} at most")
            end = start + 4 + length
            if len(self._held) < end:
                break
            body = bytes(self._held[start + 4 : end])
            start = end
            yield _message(body) if length else None
        del self._held[:start]


def receive(sock: socket.socket) -> dict[str, Any]:
    """Read exactly one message. Raises `OSError`, `BadFrame`."""
    while True:
        (length,) = struct.unpack(">I", _exactly(sock, 4))
        if length > LONGEST:
            raise BadFrame(f"a message of {length} bytes; {LONGEST} at most")
        if length:
            return _message(_exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return bytes(data)


def _message(body: bytes) -> dict[str, Any]:
    try:
        found = from_json(body)
    except ValueError as error:
        raise BadFrame(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadFrame("not an object")
    return found
