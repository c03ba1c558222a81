"""Functions of upstream that a plugin replaces: listed, so that nobody has to search for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpstreamPatch:
    """One function or method of upstream that does something else while a plugin is in use."""

    target: str
    """Where it is defined, as Python names it: `mlx_lm.models.base.scaled_dot_product_attention`.
    """
    version: str
    """The distribution and version that it was read in: `mlx-lm 0.32.2`."""
    reason: str
    """One line for people: what upstream does, and what this does in its place."""
