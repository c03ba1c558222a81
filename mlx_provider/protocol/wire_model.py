"""The base classes of messages between client and engine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator

from ..bounds import checked_fields

PROTOCOL_VERSION = 1
MOST_TOKENS = 2**31 - 1
MOST_SECONDS = 10**9
"""Bound of a system's clocks and waits."""


class Wire(BaseModel):
    """Frozen; refuses unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Asked(Wire):
    _few_fields = model_validator(mode="before")(checked_fields)
