"""Images and videos of a request: fetched, checked, and decoded when a family needs them, in memory
in which each tenant has an equal share."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...byte_gate import ByteGate, Ticket
from ...errors import MediaError, MLXProviderError, Overloaded
from ...records import MediaItem
from ...records.model import Size
from ...settings import EngineSettings
from ...upstream.runtime import trim_heap
from ..messages.parts import MediaRef
from .clip import Clip
from .decode import Picture, open_picture, rgb_pixels
from .fetch import Fetched, MediaPolicy, Source, fetch_all

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["MediaClaim", "MediaPolicy", "MediaRoom", "load_media"]
LARGE = 64 * 2**20  # bytes; after such a decoding, freed memory is given back to the system
PIXEL = 3  # bytes
Encoded = Picture | Clip


class MediaRoom:
    """Limits the memory of images that are decoded, and of images that requests keep until they
    end. With one limit, decoding could wait for the end of a request. Safe from any thread."""

    def __init__(self, capacity: int, line: int = 256) -> None:
        """`capacity`: bytes. `line`: how many requests of a tenant may wait, each in a thread."""
        self.line = line
        self.decoding = ByteGate(capacity // 2)
        self.kept = ByteGate(capacity - capacity // 2)

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""
        return self.decoding.nbytes + self.kept.nbytes

    def claim(self, who: str, owner: str = "") -> MediaClaim:
        """An empty claim for the request `who` of the tenant `owner`."""
        return MediaClaim(self, who, owner)

    def refuse(self, error: MLXProviderError, who: str | None = None) -> None:
        """Raise `error` where the request `who`, or each request (`None`), waits for memory."""
        for gate in (self.kept, self.decoding):
            gate.refuse(error, who)


class MediaClaim:
    """The memory of a request's media: encoded until `close`, scaled until `end_prefill`."""

    def __init__(self, room: MediaRoom, who: str, owner: str) -> None:
        self.room, self.who, self.owner = room, who, owner
        self._ticket: Ticket | None = None
        self._encoded = 0

    def take(self, encoded: int, scaled: int) -> None:
        """Wait for so many bytes. Raises `Overloaded`, or the error given to `refuse`."""
        self.close()  # a prompt that is prepared again starts with an empty claim
        self._encoded = encoded
        if self.room.kept.count_waiting(self.owner) >= self.room.line:
            raise Overloaded(f"{self.room.line} requests wait for room for their images, the limit")
        self._ticket = self.room.kept.ask(encoded + scaled, self.owner, self.who)
        self._ticket.wait()

    def decoding(self, nbytes: int) -> Ticket:
        """Bytes for one decoding, which runs in a `with` block of the ticket."""
        return self.room.decoding.ask(nbytes, self.owner, self.who)

    def end_prefill(self) -> None:
        """Free the bytes of the scaled images."""
        if self._ticket is not None:
            self._ticket.shrink(self._encoded)

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
    charged with the encoded images, and with scaled images of at most `max_pixels` each (0: the
    policy's limit). Blocks. Clips are decoded here, images on demand. This function and the items
    raise `MediaError` that names the part."""
    policy = policy or MediaPolicy()
    claim = claim or MediaRoom(EngineSettings().media_bytes).claim("")
    loads = [_Load(ref, policy) for ref in refs]
    for load in loads:
        load.attempt(load.find_sources)
    fetched = fetch_all([source for load in loads for source in load.sources], policy)
    for load in loads:
        load.attempt(partial(load.open, [next(fetched) for _ in load.sources]))
    left = policy.max_total_pixels
    reason = "the images of this request are too large together; send fewer or smaller ones"
    for load in reversed(loads):  # later images have precedence
        pixels = sum(map(load.pixels, load.opened))
        if pixels <= left:
            left -= pixels
        else:
            load.fail(reason)
    most = max_pixels or policy.max_pixels
    claim.take(
        sum(len(part.data) for load in loads for part in load.opened),
        PIXEL * sum(load.pixels(part, most) for load in loads for part in load.opened),
    )
    for load in loads:
        load.attempt(partial(load.make, claim))
    return [load.result for load in loads]


class _Load:
    """The steps from one reference to its `result`. After an error, `attempt` skips the others."""

    def __init__(self, ref: MediaRef, policy: MediaPolicy) -> None:
        self._ref, self._policy = ref, policy
        self.sources: list[Source] = []
        self.opened: list[Encoded] = []
        self.result: MediaItem | MediaError = MediaError("")
        self._failed = False

    def attempt(self, step: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            step()
        except MediaError as error:
            self._end(error)

    def fail(self, reason: str) -> None:
        self._end(self._error(reason, brief="too large"))

    def find_sources(self) -> None:
        ref, urls = self._ref, self._ref.source
        if urls is None:
            raise self._error(f"the {ref.kind} has no source; send a data: URL or an https: URL")
        if ref.kind == "audio" or (ref.kind == "image" and not isinstance(urls, str)):
            raise self._error(f"{ref.kind} is not supported; send it as text")
        if isinstance(urls, str):
            self.sources = [Source(urls, ref.path, ref.required)]
            return
        if not 0 < len(urls) <= self._policy.max_frames:
            most = self._policy.max_frames
            raise self._error(f"a video takes 1 to {most} frames, not {len(urls)}")
        frames = [(url, f"{ref.path}.video[{i}]") for i, url in enumerate(urls)]
        self.sources = [Source(url, path, ref.required) for url, path in frames]

    def open(self, fetched: Sequence[Fetched]) -> None:
        clip = self._ref.kind == "video" and isinstance(self._ref.source, str)
        opened: list[Encoded] = []
        for source, data in zip(self.sources, fetched, strict=True):
            if isinstance(data, MediaError):
                raise data
            if clip:
                opened.append(Clip(data, source.path))
            else:
                opened.append(open_picture(data, source.path, self._policy.max_pixels))
        self.opened = opened

    def pixels(self, part: Encoded, most: int = sys.maxsize) -> int:
        if isinstance(part, Clip):
            return self._policy.max_clip_pixels
        return min(part.width * part.height, most)

    def make(self, claim: MediaClaim) -> None:
        ref = self._ref
        if isinstance(self.opened[0], Clip):
            self.result = replace(_clip(self.opened[0], self._policy, claim), path=ref.path)
            return
        frames = [_image(picture, claim) for picture in self.opened if isinstance(picture, Picture)]
        if isinstance(ref.source, str):
            self.result = replace(frames[0], detail=ref.detail, path=ref.path)
            return
        if len({frame.shape for frame in frames}) > 1:
            raise self._error("the frames of a video must have one size")
        self.result = MediaItem(
            "video",
            (len(frames), *frames[0].shape),
            lambda size, resample: _stack(frames, size, resample),
            _digest("video", *(frame.content_hash for frame in frames)),
            ref.detail,
            ref.path,
        )

    def _error(self, reason: str, **more: str) -> MediaError:
        return MediaError(f"{self._ref.path}: {reason}", param=self._ref.path, **more)

    def _end(self, error: MediaError) -> None:
        if self._ref.required:
            raise error
        self._failed, self.result, self.opened = True, error, []


def _clip(clip: Clip, policy: MediaPolicy, claim: MediaClaim) -> MediaItem:
    """Decoded at once: only then the number of frames is known."""
    with claim.decoding(2 * PIXEL * policy.max_clip_pixels):
        frames = clip.frames(policy)
    return MediaItem.of("video", frames, _digest("clip", hashlib.sha256(clip.data).hexdigest()))


def _image(picture: Picture, claim: MediaClaim) -> MediaItem:
    def decode(size: Size | None, resample: int) -> NDArray[np.uint8]:
        need = picture.decoding_bytes(size)
        with claim.decoding(need):
            pixels = rgb_pixels(picture, size, resample)
            if need > LARGE:
                trim_heap()
            return pixels

    digest = hashlib.sha256(picture.data).hexdigest()
    return MediaItem("image", (picture.height, picture.width, 3), decode, digest)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _stack(frames: list[MediaItem], size: Size | None, resample: int) -> NDArray[np.uint8]:
    import numpy as np

    shape = frames[0].shape if size is None else (*size, 3)
    together = np.empty((len(frames), *shape), np.uint8)
    for i, frame in enumerate(frames):
        together[i] = frame.decode(size, resample)
    return together
