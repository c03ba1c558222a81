"""Separates the pixels of a PNG or JPEG from its metadata, which may be malformed or too large."""

import zlib
from collections.abc import Iterator

PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
CHUNKS = 2**17
UNPACKED = 32 * 2**20
PIECE = 2**16
PACKED = {b"zTXt": 0, b"iCCP": 0, b"iTXt": 2}
"""Chunks with packed data, and the number of texts before these data."""
METADATA = (*range(0xE1, 0xEE), 0xEF, 0xFE)
"""JPEG segments without effect on pixels: all but JFIF's and Adobe's colour transform."""


def separated(data: bytes) -> tuple[bytes, bytes] | None:
    """The pixels, and the EXIF data; `None`: neither PNG nor JPEG. Raises `ValueError`
    for too many chunks, or metadata that unpack to more than `UNPACKED` bytes."""
    if data.startswith(PNG):
        return _png(data)
    return _jpeg(data) if data.startswith(JPEG) else None


def _png(data: bytes) -> tuple[bytes, bytes]:
    """Layout: PNG, third edition, section 5."""
    kept, exif, room = [PNG], b"", UNPACKED
    for kind, body, at in _chunks(data):
        if not kind[0] & 0x20:
            kept.append(data[at : at + len(body) + 12])
        elif kind == b"tRNS":  # transparent colours
            kept += [data[at : at + 8], body, zlib.crc32(kind + body).to_bytes(4)]
        elif kind == b"eXIf":
            exif = exif or body
        elif kind in PACKED:
            room -= _unpack(body, PACKED[kind], room)
    if not data.endswith(kept[-1]) or kept[-1][4:8] != b"IEND":
        kept.append(bytes(4) + b"IEND" + zlib.crc32(b"IEND").to_bytes(4))
    return b"".join(kept), exif


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    at = len(PNG)
    for _ in range(CHUNKS):
        size = int.from_bytes(data[at : at + 4])
        if at + size + 12 > len(data):
            return
        kind = data[at + 4 : at + 8]
        yield kind, data[at + 8 : at + 8 + size], at
        at += size + 12
        if kind == b"IEND":
            return
    raise ValueError(f"more than {CHUNKS} chunks")


def _unpack(body: bytes, texts: int, room: int) -> int:
    rest = body.partition(b"\0")[2]
    if texts and rest[:1] != b"\1":
        return 0
    rest = rest[2:] if texts else rest[1:]
    for _ in range(texts):
        rest = rest.partition(b"\0")[2]
    unpacker, total = zlib.decompressobj(), 0
    try:
        while rest and not unpacker.eof:
            total += len(unpacker.decompress(rest, PIECE))
            rest = unpacker.unconsumed_tail
            if total > room:
                raise ValueError(f"its metadata unpack to more than {UNPACKED} bytes")
    except zlib.error:
        pass
    return total


def _jpeg(data: bytes) -> tuple[bytes, bytes]:
    """Layout: ITU T.81, annex B. All data from the first scan on are pixels."""
    kept, exif, at = [data[:2]], b"", 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        if data[at + 1] == 0xFF:  # a filler
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if data[at + 1] not in METADATA:
            kept.append(data[at:end])
        elif data[at + 4 : at + 10] == b"Exif\0\0":
            exif = exif or data[at + 10 : end]
        at = end
    return b"".join([*kept, data[at:]]), exif
