"""Images and videos of a request: fetched, checked, and decoded when a family needs them."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...config import EngineSettings
from ...errors import MediaError
from ...records import MediaItem
from ...records.pixels import LANCZOS, Size, scaled
from ...upstream.heap import give_back
from ..messages.parts import MediaRef
from .clip import Clip
from .decode import Picture, fitting, open_picture, rgb_pixels
from .fetch import Source, fetch_all
from .policy import MediaPolicy
from .room import MediaClaim, MediaRoom

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MediaPolicy", "load_media"]

LARGE = 64 * 2**20
"""Bytes of an image's decoding above which free memory is returned to the system."""
PIXEL = 3
"""Bytes of a pixel that is kept for the model."""


Encoded = Picture | Clip


def load_media(
    refs: Sequence[MediaRef],
    policy: MediaPolicy | None = None,
    claim: MediaClaim | None = None,
    max_pixels: int = 0,
) -> list[MediaItem]:
    """One item per reference, in order. Sources are fetched in parallel, and headers are read.

    `claim` is charged with the encoded images and with the scaled images of at most `max_pixels`
    each; unset: a claim with its own limits. Pixels are decoded on demand, which raises
    `MediaError` for a broken image. Blocks; call it from a thread without a running event loop.
    Raises `MediaError` that names the part, and the width × height of an image that is too large.
    """
    policy = policy or MediaPolicy()
    claim = claim or MediaRoom(EngineSettings.media_bytes).claim("")
    sources = [source for ref in refs for source in _sources(ref, policy)]
    clips = {ref.path for ref in refs if ref.kind == "video" and isinstance(ref.source, str)}
    opened = [_opened(*each, clips, policy) for each in fetch_all(sources, policy)]
    _check_total(opened, policy)
    most = max_pixels or policy.max_pixels
    claim.take(
        sum(len(each.data) for each in opened),
        PIXEL * sum(_kept(each, policy, most) for each in opened),
    )
    left = iter(opened)
    return [_item(ref, left, policy, claim) for ref in refs]


def _opened(source: Source, data: bytes, clips: Container[str], policy: MediaPolicy) -> Encoded:
    if source.path in clips:
        return Clip(data, source.path)
    return open_picture(data, source.path, policy.max_pixels)


def _pixels(encoded: Encoded, policy: MediaPolicy) -> int:
    """Most pixels that it may decode to."""
    if isinstance(encoded, Clip):
        return policy.max_clip_pixels
    return encoded.width * encoded.height


def _kept(encoded: Encoded, policy: MediaPolicy, most: int) -> int:
    """Pixels that are kept for the model."""
    pixels = _pixels(encoded, policy)
    return pixels if isinstance(encoded, Clip) else min(pixels, most)


def _check_total(opened: Sequence[Encoded], policy: MediaPolicy) -> None:
    left = policy.max_total_pixels
    for picture in opened:
        left -= _pixels(picture, policy)
        if left < 0:
            raise MediaError(
                f"{picture.path}: the images of this request are too large together; "
                "send fewer or smaller ones",
                param=picture.path,
            )


def _sources(ref: MediaRef, policy: MediaPolicy) -> list[Source]:
    if ref.source is None:
        raise MediaError(
            f"{ref.path}: the {ref.kind} has no source; send a data: URL or an https: URL",
            param=ref.path,
        )
    if ref.kind == "image" and isinstance(ref.source, str):
        return [Source(ref.source, ref.path)]
    if ref.kind == "video" and isinstance(ref.source, tuple):
        if not 0 < len(ref.source) <= policy.max_frames:
            raise MediaError(
                f"{ref.path}: a video takes 1 to {policy.max_frames} frames, not {len(ref.source)}",
                param=ref.path,
            )
        return [Source(url, f"{ref.path}.video[{i}]") for i, url in enumerate(ref.source)]
    if ref.kind == "video" and isinstance(ref.source, str):
        return [Source(ref.source, ref.path)]
    raise MediaError(f"{ref.path}: {ref.kind} is not supported; send it as text", param=ref.path)


def _item(
    ref: MediaRef, opened: Iterator[Encoded], policy: MediaPolicy, claim: MediaClaim
) -> MediaItem:
    low = policy.low_detail_side if ref.detail == "low" else None
    count = len(ref.source) if isinstance(ref.source, tuple) else 1
    parts = [next(opened) for _ in range(count)]
    if isinstance(parts[0], Clip):
        return _clip(parts[0], policy, claim)
    frames = [_image(each, claim, low) for each in parts if isinstance(each, Picture)]
    if isinstance(ref.source, str):
        return replace(frames[0], detail=ref.detail)
    if len({frame.shape for frame in frames}) > 1:
        raise MediaError(f"{ref.path}: the frames of a video must have one size", param=ref.path)
    return MediaItem(
        "video",
        (len(frames), *frames[0].shape),
        lambda size, resample: _stacked(frames, size, resample),
        _digest("video", *(frame.content_hash for frame in frames)),
        ref.detail,
    )


def _clip(clip: Clip, policy: MediaPolicy, claim: MediaClaim) -> MediaItem:
    """Decoded at once, because only the frames show their number."""
    need = 2 * PIXEL * policy.max_clip_pixels
    with claim.decoding(need):
        frames = clip.frames(policy)
    return MediaItem.of("video", frames, _digest("clip", hashlib.sha256(clip.data).hexdigest()))


def _image(picture: Picture, claim: MediaClaim, low: int | None) -> MediaItem:
    decode = _Decode(picture, claim)
    content_hash = hashlib.sha256(picture.data).hexdigest()
    shape = (picture.height, picture.width)
    if low is not None and max(shape) > low:
        content_hash = _digest(content_hash, f"low{low}")
        shape = fitting(*shape, low)
        decode = replace(decode, low=shape)
    return MediaItem("image", (*shape, 3), decode, content_hash)


@dataclass(frozen=True)
class _Decode:
    """Pixels of one picture. Pictures are decoded one at a time."""

    picture: Picture
    claim: MediaClaim
    low: Size | None = None
    """Size to which it is scaled down first."""

    def __call__(self, size: Size | None, resample: int) -> NDArray[np.uint8]:
        need = self.picture.decoding_bytes(self.low or size)
        with self.claim.decoding(need):
            pixels = self._decoded(size, resample)
            if need > LARGE:
                give_back()
            return pixels

    def _decoded(self, size: Size | None, resample: int) -> NDArray[np.uint8]:
        if self.low is None:
            return rgb_pixels(self.picture, size, resample)
        return scaled(rgb_pixels(self.picture, self.low, LANCZOS), size, resample)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _stacked(frames: list[MediaItem], size: Size | None, resample: int) -> NDArray[np.uint8]:
    import numpy as np

    shape = frames[0].shape if size is None else (*size, 3)
    together = np.empty((len(frames), *shape), np.uint8)
    for i, frame in enumerate(frames):
        together[i] = frame.decode(size, resample)
    return together
