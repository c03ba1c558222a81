"""The operator's limits on media in requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaPolicy:
    """Limits on the media of one request. The defaults suit an engine with untrusted clients."""

    allow_private: bool = False
    """Allow loopback, private, link-local and other addresses that are not public."""
    allow_file: bool = False
    """Read `file://` URLs and plain paths."""
    max_bytes: int = 20 * 2**20
    """Encoded size of one image."""
    max_total_bytes: int = 128 * 2**20
    """Encoded size of everything that one request has fetched."""
    max_pixels: int = 64_000_000
    """Width × height of one image. A family may scale it down further."""
    max_total_pixels: int = 256_000_000
    max_frames: int = 256
    max_clip_pixels: int = 32_000_000
    """Frames × width × height of a video clip. Its frames are scaled down to that."""
    clip_timeout: float = 20.0
    """Seconds for decoding one clip."""
    timeout: float = 20.0
    """Seconds for all fetches of a request together, from the first byte sent."""
    max_redirects: int = 3
    max_parallel: int = 8
    """Parallel fetches of one request."""
    low_detail_side: int = 512
    """Longest side in pixels of an image sent with `detail: low`."""
