"""The list of functions of upstream that a plugin replaces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpstreamPatch:
    """A function or method of upstream that a plugin replaces."""

    target: str
    """Its full name: `mlx_lm.models.base.scaled_dot_product_attention`."""
    version: str
    """The distribution and version of the source that was read: `mlx-lm 0.32.2`."""
    reason: str
    """One line for people: what upstream does, and what the replacement does."""
