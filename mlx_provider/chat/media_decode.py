"""Encoded images to RGB pixels."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MediaError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Formats that are decoded; Pillow's others include interpreters of foreign programs (EPS)."""

# What Pillow's decoders raise over bytes that are not what they seem; they have no common base.
_BROKEN = (
    OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, AttributeError,
    OverflowError, ZeroDivisionError, MemoryError, RuntimeError, struct.error, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """An image whose header was read; its pixels are not decoded yet."""

    image: Any
    path: str
    width: int
    height: int


def open_picture(data: bytes, path: str, max_pixels: int) -> Picture:
    """Read the header. Raises `MediaError` that names the part, and the size if too large."""
    from PIL import Image

    try:
        image = _identify(data)
    except (*_BROKEN, Image.DecompressionBombError) as broken:
        raise _unreadable(path, broken) from None
    if image is None:
        known = ", ".join(FORMATS)
        raise MediaError(f"{path}: the data is no image in a known format ({known})", param=path)
    width, height = image.size
    if width < 1 or height < 1 or width * height > max_pixels:
        raise MediaError(
            f"{path}: the image is {width} × {height} pixels; at most {max_pixels} pixels are "
            "accepted, send it smaller",
            param=path,
        )
    return Picture(image, path, width, height)


def rgb_pixels(picture: Picture, longest_side: int | None = None) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of the first frame, upright, over white where transparent.

    longest_side: scale down to it, keeping the proportions. Raises `MediaError`.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        picture.image.load()
        image = _to_rgb(ImageOps.exif_transpose(picture.image))
        if longest_side is not None and max(image.size) > longest_side:
            image.thumbnail((longest_side, longest_side), Image.Resampling.LANCZOS)
        return np.array(image, dtype=np.uint8)
    except (*_BROKEN, Image.DecompressionBombError) as broken:
        raise _unreadable(picture.path, broken) from None


def _unreadable(path: str, broken: BaseException) -> MediaError:
    return MediaError(f"{path}: the image is malformed or truncated ({broken})", param=path)


def _identify(data: bytes) -> Any:
    """Pillow's image for the data, or `None`.

    The format's class is called directly, because `Image.open` (Pillow 13, PIL/Image.py) raises
    its own error over large images before their width and height are known to the caller.
    """
    from PIL import Image

    Image.init()
    for name in FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory is not None and (accept is None or accept(data[:16]) is True):
            return factory(io.BytesIO(data), "")
    return None


def _to_rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_eight_bit(image))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGB", rgba.size, "white")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


def _eight_bit(image: Any) -> NDArray[np.uint8]:
    """Grey levels of 16-bit, 32-bit or float pixels, scaled to 0 .. 255."""
    import numpy as np

    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    if image.mode == "F":
        scale = 255.0 if values.max() <= 1.0 else 1.0
    else:
        scale = 1 / 257 if image.mode.startswith("I;16") or values.max() > 255 else 1.0
    return np.clip(np.rint(values * scale), 0, 255).astype(np.uint8)
