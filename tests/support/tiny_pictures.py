"""Files of images, whole or of a few chunks, and how messages hold them."""

import base64
import io
import struct
import zlib
from typing import Any

from PIL import Image


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def chunk(kind: bytes, body: bytes, crc: int = 0) -> bytes:
    """Of a PNG. `crc`: by what its checksum is wrong."""
    check = zlib.crc32(kind + body) ^ crc
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)


def tiff_of_one_tile(side: int, shown: int) -> bytes:
    """`shown` × `shown` pixels of a tile that may be much larger."""
    packer = zlib.compressobj(9)
    packed = b"".join([*(packer.compress(bytes(side)) for _ in range(side)), packer.flush()])
    tags = [
        (256, shown), (257, shown), (258, 8), (259, 8), (262, 1), (277, 1),
        (322, side), (323, side), (324, 8 + 2 + 120 + 4), (325, len(packed)),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, 10) + entries + bytes(4) + packed
