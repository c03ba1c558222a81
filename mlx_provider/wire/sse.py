"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping

from .asked import json_bytes

MEDIA_TYPE = "text/event-stream"
COMMENT = b": the engine is at work\n\n"
"""Clients ignore comments."""


def data(value: object) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def named(value: Mapping[str, object]) -> bytes:
    return b"event: " + str(value["type"]).encode() + b"\n" + data(value)
