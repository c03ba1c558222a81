"""Images and videos of a request: fetched, checked, decoded to pixels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import MediaError
from ..records import MediaItem
from .media_decode import Picture, open_picture, rgb_pixels
from .media_fetch import Source, fetch_all
from .media_policy import MediaPolicy
from .messages_parts import MediaRef

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MediaPolicy", "load_media"]


def load_media(refs: Sequence[MediaRef], policy: MediaPolicy | None = None) -> list[MediaItem]:
    """One item per reference, in order; sources are fetched side by side.

    Blocks; to be called from a thread without a running event loop. Raises `MediaError` that
    names the part, and the width × height of an image that is too large.
    """
    policy = policy or MediaPolicy()
    sources = [source for ref in refs for source in _sources(ref, policy)]
    fetched = iter(fetch_all(sources, policy))
    budget = _PixelBudget(policy.max_total_pixels)
    return [_item(ref, fetched, policy, budget) for ref in refs]


@dataclass
class _PixelBudget:
    """Pixels that the media of one request may still decode to."""

    left: int

    def take(self, picture: Picture, path: str) -> None:
        self.left -= picture.width * picture.height
        if self.left < 0:
            raise MediaError(
                f"{path}: the images of this request are too large together; "
                "send fewer or smaller ones",
                param=path,
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
    remedy = "send it as a list of frames: {'type': 'video', 'video': [image URLs]}"
    raise MediaError(f"{ref.path}: this {ref.kind} is not supported; {remedy}", param=ref.path)


def _item(
    ref: MediaRef,
    fetched: Iterator[tuple[Source, bytes]],
    policy: MediaPolicy,
    budget: _PixelBudget,
) -> MediaItem:
    low = policy.low_detail_side if ref.detail == "low" else None
    if isinstance(ref.source, str):
        source, data = next(fetched)
        pixels, content_hash = _image(source, data, policy, budget, low)
        return MediaItem("image", pixels, content_hash, ref.detail)
    frames = [_image(*next(fetched), policy, budget, low) for _ in ref.source or ()]
    return MediaItem(
        "video",
        _stack(ref, [pixels for pixels, _ in frames]),
        _digest("video", *(frame for _, frame in frames)),
        ref.detail,
    )


def _image(
    source: Source, data: bytes, policy: MediaPolicy, budget: _PixelBudget, low: int | None
) -> tuple[NDArray[np.uint8], str]:
    picture = open_picture(data, source.path, policy.max_pixels)
    budget.take(picture, source.path)
    content_hash = hashlib.sha256(data).hexdigest()
    if low is not None and max(picture.width, picture.height) > low:
        content_hash = _digest(content_hash, f"low{low}")
    return rgb_pixels(picture, longest_side=low), content_hash


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _stack(ref: MediaRef, frames: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    import numpy as np

    if len({frame.shape for frame in frames}) > 1:
        raise MediaError(f"{ref.path}: the frames of a video must have one size", param=ref.path)
    return np.stack(frames)
