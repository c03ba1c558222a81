"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping

from .asked import json_bytes

MEDIA_TYPE = "text/event-stream"
COMMENT = b": the engine is at work\n\n"
"""Is no event for a client."""


def data(value: object) -> bytes:
    """An event without a name."""
    return b"data: " + json_bytes(value) + b"\n\n"


def named(value: Mapping[str, object]) -> bytes:
    """An event with the name of its type."""
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)
