"""Images and videos of a request: fetched, checked, decoded to pixels."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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

__all__ = ["MediaPolicy", "SeenImages", "load_media"]

SEEN = 4096
"""Images whose shape is remembered."""


class SeenImages:
    """Shapes of images that were decoded before, so that they need not be again. Any thread."""

    def __init__(self) -> None:
        self._shapes: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def shape(self, content_hash: str) -> tuple[int, ...] | None:
        """(H, W, 3), or `None` for an image not seen before."""
        with self._lock:
            if content_hash in self._shapes:
                self._shapes.move_to_end(content_hash)
            return self._shapes.get(content_hash)

    def add(self, content_hash: str, shape: tuple[int, ...]) -> None:
        """Remember an image that can be decoded."""
        with self._lock:
            self._shapes[content_hash] = shape
            if len(self._shapes) > SEEN:
                self._shapes.popitem(last=False)


def load_media(
    refs: Sequence[MediaRef], policy: MediaPolicy | None = None, seen: SeenImages | None = None
) -> list[MediaItem]:
    """One item per reference, in order; sources are fetched side by side.

    Images are decoded here, so that a broken one is refused, unless they were `seen` before.
    Blocks; to be called from a thread without a running event loop. Raises `MediaError` that
    names the part, and the width × height of an image that is too large.
    """
    policy, seen = policy or MediaPolicy(), seen or SeenImages()
    sources = [source for ref in refs for source in _sources(ref, policy)]
    fetched = iter(fetch_all(sources, policy))
    budget = _PixelBudget(policy.max_total_pixels)
    return [_item(ref, fetched, policy, budget, seen) for ref in refs]


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
    seen: SeenImages,
) -> MediaItem:
    low = policy.low_detail_side if ref.detail == "low" else None
    if isinstance(ref.source, str):
        return replace(_image(*next(fetched), policy, budget, low, seen), detail=ref.detail)
    frames = [_image(*next(fetched), policy, budget, low, seen) for _ in ref.source or ()]
    if len({frame.shape for frame in frames}) > 1:
        raise MediaError(f"{ref.path}: the frames of a video must have one size", param=ref.path)
    return MediaItem(
        "video",
        (len(frames), *frames[0].shape),
        lambda: _stacked(frames),
        _digest("video", *(frame.content_hash for frame in frames)),
        ref.detail,
    )


def _image(
    source: Source,
    data: bytes,
    policy: MediaPolicy,
    budget: _PixelBudget,
    low: int | None,
    seen: SeenImages,
) -> MediaItem:
    picture = open_picture(data, source.path, policy.max_pixels)
    budget.take(picture, source.path)
    content_hash = hashlib.sha256(data).hexdigest()
    if low is not None and max(picture.width, picture.height) > low:
        content_hash = _digest(content_hash, f"low{low}")
    shape = seen.shape(content_hash)
    if shape is not None:
        return MediaItem("image", shape, partial(rgb_pixels, picture, low), content_hash)
    item = MediaItem.of("image", rgb_pixels(picture, low), content_hash)
    seen.add(content_hash, item.shape)
    return item


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _stacked(frames: list[MediaItem]) -> NDArray[np.uint8]:
    import numpy as np

    return np.stack([frame.pixels for frame in frames])
