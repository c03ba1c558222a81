"""Decodes images to RGB pixels with as little memory as the codecs permit. Codecs decode a whole
picture (JPEG: also at an eighth, a quarter or half of its sides). The other steps run in strips."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import MediaError
from .metadata import JPEG, separate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Pillow's other formats include interpreters of untrusted programs (EPS)."""
JPEG_SCAN, JPEG_END = b"\xff\xda", b"\xff\xd9"
FILLING = b"\x55\xaa\x33\xc7" * 2**12  # one of the two ends with which `_decode` tries a cut JPEG
GAP = 2
"""Averaging over squares leaves at least so many times the target's sides, so it is not seen."""
STRIP_PIXELS = 2**20  # of a strip in which a step runs
TILE_PIXELS = 2**20  # tiles of a TIFF may have so many, or as many as its image
PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}
"""By Pillow's mode; 4 for the others."""
CODEC_BYTES, PROGRESSIVE_BYTES = {"WEBP": 12, "AVIF": 12}, 6
"""Further bytes per pixel that the codec of a format, or of a progressive JPEG, needs."""
# What Pillow's decoders raise over malformed bytes: these errors have no common base class.
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, AttributeError,
    OverflowError, ZeroDivisionError, MemoryError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True)
class Picture:
    """An encoded image (`data`) in the part `path` of a request. `width` and `height` are those of
    the upright image, `orientation` is EXIF's, 1 to 8, and `format` and `mode` are Pillow's."""

    data: bytes
    path: str
    width: int
    height: int
    orientation: int = 1
    format: str = ""
    mode: str = "RGB"
    progressive: bool = False

    @classmethod
    def of(
        cls, data: bytes, path: str, size: tuple[int, int], orientation: int, *more: Any
    ) -> Picture:
        """`size`: (width, height) before the rotation. `more`: format, mode, progressive."""
        return cls(data, path, *(size if orientation < 5 else size[::-1]), orientation, *more)

    def reduction(self, size: tuple[int, int] | None) -> int:
        """Side of the squares averaged to a pixel in scaling to `size` (height, width); 1: none."""
        if size is None:
            return 1
        return max(1, min(self.height // (GAP * size[0]), self.width // (GAP * size[1])))

    def decoding_bytes(self, size: tuple[int, int] | None = None) -> int:
        """Peak memory of `rgb_pixels`, without the result (estimate)."""
        pixels, factor = self.width * self.height, self.reduction(size)
        by_codec = _codec_reduction(factor) if self.format == "JPEG" else 1
        whole = by_codec * (factor // by_codec)  # `_decode` rounds down
        decoded = PIXEL_BYTES.get(self.mode, 4) + CODEC_BYTES.get(self.format, 0)
        reduced = 4 + (4 if self.orientation > 1 else 0) + 3  # as RGB, rotated, and for numpy
        buffers = pixels * decoded // by_codec**2 + pixels * reduced // whole**2
        return buffers + pixels * PROGRESSIVE_BYTES * self.progressive + 16 * STRIP_PIXELS


def open_picture(data: bytes, path: str, max_pixels: int) -> Picture:
    """Read the header only. Raises `MediaError` that names the part, also if it is too large."""
    from PIL import Image

    try:
        if (size := webp_size(data)) is not None:
            _check_size(size, path, max_pixels)
            return Picture.of(data, path, size, _orientation({}, _webp_exif(data)), "WEBP")
        picture = _without_metadata_if_broken(data, partial(_open, data, path, max_pixels))
        if picture is not None:
            return picture
    except (*_BROKEN, Image.DecompressionBombError) as broken:
        raise _unreadable(path, broken) from None
    known = ", ".join(FORMATS)
    raise MediaError(f"{path}: the data is no image in a known format ({known})", param=path)


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height; `None`: not WebP. Pillow would allocate two canvases of this size. Raises
    `ValueError`, `struct.error` for a malformed file. Layout: RFC 9649, sections 2.4 to 2.7."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8X":
            (width,), (height,) = (struct.unpack_from("<I", data, at) for at in (23, 26))
            return (width >> 8) + 1, (height >> 8) + 1
        case b"VP8L" if data[20:21] == b"\x2f":
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 " if data[23:26] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    raise ValueError(f"a WebP file begins with {data[12:16]!r}")


def _webp_exif(data: bytes) -> bytes | None:
    """Among the first 1000 chunks."""
    at = 12 if data[12:16] == b"VP8X" and data[20] & 8 else len(data)
    for _ in range(1000):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"EXIF":
            return data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    return None


def _open(data: bytes, path: str, max_pixels: int, readable: bytes, exif: Any) -> Picture | None:
    image = _identify(readable)
    if image is None:
        return None
    _check_size(image.size, path, max_pixels)
    _check_tile(image, path)
    exif = exif or image.info.get("exif") or separate(data)[1]  # a PNG may have it after the pixels
    # Pillow rotates TIFF images itself
    orientation = 1 if image.format == "TIFF" else _orientation(image.info, exif)
    progressive = bool(image.info.get("progressive"))
    return Picture.of(data, path, image.size, orientation, image.format, image.mode, progressive)


def _identify(data: bytes) -> Any:
    """Pillow's image, or `None`. Calls the format's class, because `Image.open` (Pillow 13,
    PIL/Image.py) raises its own error over large images before their size is known."""
    from PIL import Image

    Image.init()
    for name in FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory is not None and (accept is None or accept(data[:16]) is True):
            return factory(io.BytesIO(data), "")
    return None


def _check_size(size: tuple[int, int], path: str, max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1 or width * height > max_pixels:
        sizes = f"the image is {width} × {height} pixels; at most {max_pixels} pixels are accepted"
        raise MediaError(f"{path}: {sizes}, send it smaller", param=path, brief="too large")


def _check_tile(image: Any, path: str) -> None:
    """Refuse a TIFF with too large tiles: libtiff decodes whole ones, however little is shown."""
    width, height = image.size
    tags = getattr(image, "tag_v2", None) or {}
    tile = int(tags.get(322, 1)) * int(tags.get(323, 1))  # TileWidth, TileLength
    if tile > max(TILE_PIXELS, width * height):
        sizes = f"the image is {width} × {height} pixels, in tiles of {tile} pixels"
        raise MediaError(f"{path}: {sizes}; save it in smaller tiles", param=path)


def _orientation(info: dict[str, Any], exif: bytes | None) -> int:
    """1 to 8; 1 for metadata that cannot be read."""
    from PIL import Image

    image = Image.Image()  # `getexif` of a PNG image would decode its pixels
    image.info = {**info, "exif": exif or None}
    try:
        found = image.getexif().get(0x0112, 1)
    except _BROKEN:
        return 1
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def rgb_pixels(
    picture: Picture, size: tuple[int, int] | None = None, resample: int = 3
) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of the first frame, upright, over white where transparent; read-only.
    `size`: (height, width). `resample`: Pillow's filter (3: bicubic). Raises `MediaError`."""
    import numpy as np
    from PIL import Image

    try:
        factor = picture.reduction(size)
        reduced = _without_metadata_if_broken(picture.data, lambda data, _: _reduce(data, factor))
        image = _rotate(reduced, picture.orientation)
        if size is not None and image.size != size[::-1]:
            image = image.resize(size[::-1], resample)
        return np.asarray(image, dtype=np.uint8)
    except (*_BROKEN, Image.DecompressionBombError) as broken:
        raise _unreadable(picture.path, broken) from None


def _without_metadata_if_broken(data: bytes, read: Callable[[bytes, bytes], T]) -> T:
    """`read(data, b"")`; if that fails, `read` of the data without metadata, and its EXIF data."""
    try:
        return read(data, b"")
    except _BROKEN as broken:
        try:
            return read(*separate(data))
        except _BROKEN:
            raise broken from None


def _unreadable(path: str, broken: BaseException) -> MediaError:
    return MediaError(f"{path}: the image is malformed or truncated ({broken})", param=path)


def _reduce(data: bytes, factor: int) -> Any:
    image, factor = _decode(data, factor)
    if image.mode == "RGB" and "transparency" not in image.info:
        squares = (0, 0, *_whole_squares(image.size, factor))
        return image if factor == 1 else image.reduce(factor, squares)
    return _reduce_strips(image, factor)


def _decode(data: bytes, factor: int) -> tuple[Any, int]:
    """The image, and the part of `factor` that is still to be applied. A JPEG without end marker is
    accepted if no pixel is missing. libjpeg makes up missing pixels from what follows the data. So
    the data is decoded twice, with different ends: if the images are equal, no pixel is made up."""
    if not data.startswith(JPEG) or data.rfind(JPEG_END) > data.rfind(JPEG_SCAN):
        return _decode_reduced(data, factor)
    data = data.rstrip(b"\xff")
    other = _checksum(_decode_reduced(data + FILLING + JPEG_END, factor)[0])
    image, factor = _decode_reduced(data + JPEG_END, factor)
    if _checksum(image) != other:
        raise OSError("the end of the image is missing")
    return image, factor


def _decode_reduced(data: bytes, factor: int) -> tuple[Any, int]:
    image = _identify(data)
    if factor > 1 and image.format == "JPEG":
        by_codec = _codec_reduction(factor)
        drafted = image.draft(None, tuple(side // by_codec for side in image.size))
        factor = factor if drafted is None else factor // by_codec
    image.load()
    return image, factor


def _codec_reduction(factor: int) -> int:
    """The part of `factor` that libjpeg can apply."""
    return next(part for part in (8, 4, 2, 1) if part <= factor)


def _checksum(image: Any) -> int:
    width, height = image.size
    rows, found = max(1, STRIP_PIXELS // width), 0
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        found = zlib.crc32(strip.tobytes(), found)
    return found


def _whole_squares(size: tuple[int, int], factor: int) -> tuple[int, int]:
    return size[0] // factor * factor, size[1] // factor * factor


def _reduce_strips(image: Any, factor: int) -> Any:
    from PIL import Image

    width, height = _whole_squares(image.size, factor)
    canvas = Image.new("RGB", (width // factor, height // factor))
    rows = max(1, STRIP_PIXELS // (width * factor)) * factor
    scale = _grey_scale(image, rows) if image.mode.startswith(("I", "F")) else 1.0
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        canvas.paste(_to_rgb(strip, scale).reduce(factor), (0, top // factor))
    return canvas


def _to_rgb(image: Any, scale: float) -> Any:
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        image = _eight_bit(image, scale)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


def _grey_scale(image: Any, rows: int) -> float:
    """Factor that turns the levels into 0 to 255. Reads `rows` at a time."""
    import numpy as np

    if image.mode.startswith("I;16"):
        return 1 / 257
    width, height = image.size
    strips = (image.crop((0, y, width, min(y + rows, height))) for y in range(0, height, rows))
    most = max(float(np.nan_to_num(strip).max()) for strip in strips)
    if image.mode == "F":
        return 255.0 if most <= 1.0 else 1.0
    return 1 / 257 if most > 255 else 1.0


def _eight_bit(image: Any, scale: float) -> Any:
    import numpy as np
    from PIL import Image

    levels = np.nan_to_num(np.asarray(image, dtype=np.float64)) * scale
    return Image.fromarray(np.clip(np.rint(levels), 0, 255).astype(np.uint8))


def _rotate(image: Any, orientation: int) -> Any:
    from PIL.Image import Transpose

    changes = (
        Transpose.FLIP_LEFT_RIGHT, Transpose.ROTATE_180, Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE, Transpose.ROTATE_270, Transpose.TRANSVERSE, Transpose.ROTATE_90,
    )  # fmt: skip
    return image.transpose(changes[orientation - 2]) if orientation > 1 else image
