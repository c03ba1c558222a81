"""Sizes of pixel arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Size = tuple[int, int]
"""(height, width)."""
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's filters (PIL/Image.py, `Resampling`)."""


def scaled(pixels: NDArray[np.uint8], size: Size | None, resample: int) -> NDArray[np.uint8]:
    """Pixels ((frames,) H, W, 3) at another size; `None`: as they are."""
    if size is None or pixels.shape[-3:-1] == size:
        return pixels
    import numpy as np
    from PIL import Image

    if pixels.ndim == 4:
        return np.stack([scaled(frame, size, resample) for frame in pixels])
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], resample))
