"""Images and videos of a request: fetched, checked, and decoded when a family needs them, in memory
that all requests share by tenants."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...byte_gate import ByteGate, Ticket
from ...config import EngineSettings
from ...errors import MediaError, MLXProviderError, Overloaded
from ...records import MediaItem
from ...records.model import LANCZOS, Size, scaled
from ...upstream.runtime import give_back
from ..messages.parts import MediaRef
from .clip import Clip
from .decode import Picture, fitting, open_picture, rgb_pixels
from .fetch import Fetched, MediaPolicy, Source, fetch_all

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "MediaClaim",
    "MediaPolicy",
    "MediaRoom",
    "load_media",
]
LARGE = 64 * 2**20
"""Bytes of a decoding above which free memory is returned to the system."""
PIXEL = 3
Encoded = Picture | Clip
T = TypeVar("T")


class MediaRoom:
    """Limits on images that are decoded, and on images that requests hold until they end. Separate,
    because decoding never waits for another request, and only the engine frees the second. Safe
    from any thread."""

    def __init__(self, capacity: int, line: int = 256) -> None:
        """`line`: requests of one tenant that may wait. Each occupies a thread."""
        self.line = line
        self.decoding = ByteGate(capacity // 2)
        self._kept = ByteGate(capacity - capacity // 2)

    @property
    def held(self) -> int:
        return self.decoding.held + self._kept.held

    def claim(self, who: str, owner: str = "") -> MediaClaim:
        """The caller must close it."""
        return MediaClaim(self, self._kept, who, owner)

    def refuse(self, error: MLXProviderError, who: str | None = None) -> None:
        for gate in (self._kept, self.decoding):
            gate.refuse(error, who)


class MediaClaim:
    """Encoded images of one request, and images scaled for the model until its prefill ends."""

    def __init__(self, room: MediaRoom, kept: ByteGate, who: str, owner: str) -> None:
        self.room = room
        self.who = who
        self.owner = owner
        self._kept = kept
        self._ticket: Ticket | None = None
        self._encoded = 0

    def take(self, encoded: int, scaled: int) -> None:
        """Wait for memory. Raises `Overloaded` if too many requests wait, else the error given to
        `refuse`."""
        self.close()  # a prompt that is prepared again starts with an empty claim
        self._encoded = encoded
        if self._kept.waiting(self.owner) >= self.room.line:
            raise Overloaded(f"{self.room.line} requests wait for room for their images, the limit")
        self._ticket = self._kept.ask(encoded + scaled, self.owner, self.who)
        self._ticket.wait()

    def decoding(self, nbytes: int) -> Ticket:
        return self.room.decoding.ask(nbytes, self.owner, self.who)

    def prefilled(self) -> None:
        if self._ticket is not None:
            self._ticket.keep(self._encoded)

    def close(self) -> None:
        if self._ticket is not None:
            self._ticket.close()


def load_media(
    refs: Sequence[MediaRef],
    policy: MediaPolicy | None = None,
    claim: MediaClaim | None = None,
    max_pixels: int = 0,
) -> list[MediaItem | MediaError]:
    """One item per reference, in order, or the error of one that is not required. `claim` is
    charged with the encoded images, and with scaled images of at most `max_pixels` each. Blocks:
    not for a thread with an event loop. Pixels are decoded on demand, which may raise `MediaError`.
    Raises `MediaError` that names the part, and the size of an image that is too large."""
    policy = policy or MediaPolicy()
    claim = claim or MediaRoom(EngineSettings.media_bytes).claim("")
    sources = [_attempt(ref, partial(_sources, ref, policy)) for ref in refs]
    listed = [source for each in sources if not isinstance(each, MediaError) for source in each]
    fetched = fetch_all(listed, policy)
    opened = [
        each
        if isinstance(each, MediaError)
        else _attempt(ref, partial(_opened, ref, [(s, next(fetched)) for s in each], policy))
        for ref, each in zip(refs, sources, strict=True)
    ]
    opened = _fitting(refs, opened, policy)
    most = max_pixels or policy.max_pixels
    whole = [part for each in opened if not isinstance(each, MediaError) for part in each]
    claim.take(
        sum(len(part.data) for part in whole),
        PIXEL * sum(_kept(part, policy, most) for part in whole),
    )
    return [
        each
        if isinstance(each, MediaError)
        else _attempt(ref, partial(_item, ref, each, policy, claim))
        for ref, each in zip(refs, opened, strict=True)
    ]


def _attempt(ref: MediaRef, make: Callable[[], T]) -> T | MediaError:
    try:
        return make()
    except MediaError as error:
        if ref.required:
            raise
        return error


def _opened(
    ref: MediaRef, fetched: Sequence[tuple[Source, Fetched]], policy: MediaPolicy
) -> list[Encoded]:
    clip = ref.kind == "video" and isinstance(ref.source, str)
    opened: list[Encoded] = []
    for source, data in fetched:
        if isinstance(data, MediaError):
            raise data
        opened.append(
            Clip(data, source.path) if clip else open_picture(data, source.path, policy.max_pixels)
        )
    return opened


def _pixels(encoded: Encoded, policy: MediaPolicy) -> int:
    if isinstance(encoded, Clip):
        return policy.max_clip_pixels
    return encoded.width * encoded.height


def _kept(encoded: Encoded, policy: MediaPolicy, most: int) -> int:
    pixels = _pixels(encoded, policy)
    return pixels if isinstance(encoded, Clip) else min(pixels, most)


def _fitting(
    refs: Sequence[MediaRef], opened: Sequence[list[Encoded] | MediaError], policy: MediaPolicy
) -> list[list[Encoded] | MediaError]:
    """The images that fit together; later ones have precedence."""
    left = policy.max_total_pixels
    fitting: list[list[Encoded] | MediaError] = []
    for ref, each in zip(reversed(refs), reversed(opened), strict=True):
        pixels = 0 if isinstance(each, MediaError) else sum(_pixels(p, policy) for p in each)
        if pixels <= left:
            left -= pixels
            fitting.append(each)
            continue
        error = MediaError(
            f"{ref.path}: the images of this request are too large together; "
            "send fewer or smaller ones",
            param=ref.path,
            brief="too large",
        )
        if ref.required:
            raise error
        fitting.append(error)
    return fitting[::-1]


def _sources(ref: MediaRef, policy: MediaPolicy) -> list[Source]:
    if ref.source is None:
        raise MediaError(
            f"{ref.path}: the {ref.kind} has no source; send a data: URL or an https: URL",
            param=ref.path,
        )
    if ref.kind == "image" and isinstance(ref.source, str):
        return [Source(ref.source, ref.path, ref.required)]
    if ref.kind == "video" and isinstance(ref.source, tuple):
        if not 0 < len(ref.source) <= policy.max_frames:
            raise MediaError(
                f"{ref.path}: a video takes 1 to {policy.max_frames} frames, not {len(ref.source)}",
                param=ref.path,
            )
        return [
            Source(url, f"{ref.path}.video[{i}]", ref.required) for i, url in enumerate(ref.source)
        ]
    if ref.kind == "video" and isinstance(ref.source, str):
        return [Source(ref.source, ref.path, ref.required)]
    raise MediaError(f"{ref.path}: {ref.kind} is not supported; send it as text", param=ref.path)


def _item(
    ref: MediaRef, parts: Sequence[Encoded], policy: MediaPolicy, claim: MediaClaim
) -> MediaItem:
    low = policy.low_detail_side if ref.detail == "low" else None
    if isinstance(parts[0], Clip):
        return replace(_clip(parts[0], policy, claim), path=ref.path)
    frames = [_image(each, claim, low) for each in parts if isinstance(each, Picture)]
    if isinstance(ref.source, str):
        return replace(frames[0], detail=ref.detail, path=ref.path)
    if len({frame.shape for frame in frames}) > 1:
        raise MediaError(f"{ref.path}: the frames of a video must have one size", param=ref.path)
    return MediaItem(
        "video",
        (len(frames), *frames[0].shape),
        lambda size, resample: _stacked(frames, size, resample),
        _digest("video", *(frame.content_hash for frame in frames)),
        ref.detail,
        ref.path,
    )


def _clip(clip: Clip, policy: MediaPolicy, claim: MediaClaim) -> MediaItem:
    """Decoded at once: only then the number of frames is known."""
    with claim.decoding(2 * PIXEL * policy.max_clip_pixels):
        frames = clip.frames(policy)
    return MediaItem.of("video", frames, _digest("clip", hashlib.sha256(clip.data).hexdigest()))


def _image(picture: Picture, claim: MediaClaim, low: int | None) -> MediaItem:
    content_hash = hashlib.sha256(picture.data).hexdigest()
    shape = (picture.height, picture.width)
    small = None if low is None or max(shape) <= low else fitting(*shape, low)
    if small is not None:
        content_hash = _digest(content_hash, f"low{low}")

    def decode(size: Size | None, resample: int) -> NDArray[np.uint8]:
        need = picture.decoding_bytes(small or size)
        with claim.decoding(need):
            if small is None:
                pixels = rgb_pixels(picture, size, resample)
            else:
                pixels = scaled(rgb_pixels(picture, small, LANCZOS), size, resample)
            if need > LARGE:
                give_back()
            return pixels

    return MediaItem("image", (*(small or shape), 3), decode, content_hash)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _stacked(frames: list[MediaItem], size: Size | None, resample: int) -> NDArray[np.uint8]:
    import numpy as np

    shape = frames[0].shape if size is None else (*size, 3)
    together = np.empty((len(frames), *shape), np.uint8)
    for i, frame in enumerate(frames):
        together[i] = frame.decode(size, resample)
    return together
