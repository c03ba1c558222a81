"""Reads the header of a WebP file; Pillow would allocate two canvases for it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

CHUNKS = 1000
"""Chunks searched for EXIF data, which follow the frames of an animation."""


@dataclass(frozen=True)
class Header:
    """Canvas size in pixels."""

    width: int
    height: int
    exif: bytes = b""


def read_header(data: bytes) -> Header | None:
    """`None`: not WebP. Raises `ValueError`, `struct.error` for a malformed file. Layout: RFC 9649,
    sections 2.4 to 2.7."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind, at = data[12:16], 20
    if kind == b"VP8X":
        flags, width, height = data[at], _uint24(data, at + 4), _uint24(data, at + 7)
        return Header(width + 1, height + 1, _exif(data) if flags & 8 else b"")
    if kind == b"VP8L" and data[at] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, at + 1)
        return Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 " and data[at + 3 : at + 6] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, at + 6)
        return Header(width & 0x3FFF, height & 0x3FFF)
    raise ValueError(f"a WebP file begins with {kind!r}")


def _uint24(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 3], "little")


def _exif(data: bytes) -> bytes:
    return next((data[at : at + size] for kind, at, size in _chunks(data) if kind == b"EXIF"), b"")


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    at = 12
    for _ in range(CHUNKS):
        if at + 8 > len(data):
            return
        (size,) = struct.unpack_from("<I", data, at + 4)
        yield data[at : at + 4], at + 8, size
        at += 8 + size + size % 2
