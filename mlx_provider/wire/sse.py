"""Server-sent events."""

from __future__ import annotations

from .asked import json_bytes

MEDIA_TYPE = "text/event-stream"
COMMENT = b": the engine is at work\n\n"
"""Is no event for a client."""


def data(value: object) -> bytes:
    """An event without a name."""
    return b"data: " + json_bytes(value) + b"\n\n"
