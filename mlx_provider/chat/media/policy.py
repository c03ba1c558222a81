"""The operator's limits on media in requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaPolicy:
    """Limits on the media of one request; the defaults suit untrusted clients."""

    allow_private: bool = False
    """Allow loopback, private, link-local and other addresses that are not public."""
    allow_file: bool = False
    max_bytes: int = 20 * 2**20
    """Encoded size of one image."""
    max_total_bytes: int = 128 * 2**20
    """Encoded size of all media of a request."""
    max_pixels: int = 64_000_000
    """Width × height of one image."""
    max_total_pixels: int = 256_000_000
    max_frames: int = 256
    max_clip_pixels: int = 32_000_000
    """Frames × width × height. Frames are scaled down to it."""
    clip_timeout: float = 20.0
    timeout: float = 20.0
    """Seconds for all fetches of a request together."""
    max_redirects: int = 3
    max_parallel: int = 8
    low_detail_side: int = 512
    """Longest side in pixels of an image sent with `detail: low`."""
