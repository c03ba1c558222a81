"""Separates the pixels of a PNG or JPEG from its metadata, which may be malformed or too large."""

import zlib

PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
PARTS = 2**17  # chunks or segments that are read; what follows is left as it is
METADATA = (*range(0xE1, 0xEE), 0xEF, 0xFE)
"""JPEG segments without effect on pixels: all but JFIF's and Adobe's colour transform."""


def separate(data: bytes) -> tuple[bytes, bytes]:
    """The image without metadata, and its EXIF data (empty: none). Other formats stay whole."""
    if data.startswith(PNG):
        return _png(data)
    return _jpeg(data) if data.startswith(JPEG) else (data, b"")


def _png(data: bytes) -> tuple[bytes, bytes]:
    """Layout: PNG, third edition, section 5."""
    pieces, exif, at = [PNG], b"", len(PNG)
    for _ in range(PARTS):
        kind, end = data[at + 4 : at + 8], at + int.from_bytes(data[at : at + 4]) + 12
        if not kind or kind == b"IEND":
            break
        if kind[0] < 0x60:  # a capital: needed for pixels
            pieces.append(data[at:end])
            if end > len(data):  # the file is cut
                return b"".join(pieces), exif
        elif kind == b"tRNS":  # transparent colours
            body = data[at + 8 : end - 4]
            pieces += [data[at : at + 8], body, zlib.crc32(kind + body).to_bytes(4)]
        elif kind == b"eXIf":
            exif = exif or data[at + 8 : end - 4]
        at = end
    else:
        return b"".join([*pieces, data[at:]]), exif
    return b"".join([*pieces, bytes(4), b"IEND", zlib.crc32(b"IEND").to_bytes(4)]), exif


def _jpeg(data: bytes) -> tuple[bytes, bytes]:
    """Layout: ITU T.81, annex B. All data from the first scan on are pixels."""
    pieces, exif, at = [data[:2]], b"", 2
    for _ in range(PARTS):
        kind, end = data[at + 1 : at + 2], at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if data[at : at + 1] != b"\xff" or kind in (b"", b"\xda"):
            break
        if kind == b"\xff":  # a filler
            end = at + 1
        elif kind[0] not in METADATA:
            pieces.append(data[at:end])
        elif data[at + 4 : at + 10] == b"Exif\0\0":
            exif = exif or data[at + 10 : end]
        at = end
    return b"".join([*pieces, data[at:]]), exif
