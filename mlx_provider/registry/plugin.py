"""Data about one installed plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..records import UpstreamPatch

FIRST_PARTY = "mlx-provider"
"""The distribution whose plugins a third party may replace."""


@dataclass(frozen=True)
class Plugin:
    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    records: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind (`model family`, `tool parser`, `kernels` ...)."""
    patches: tuple[UpstreamPatch, ...] = ()
    error: str | None = None
    notes: tuple[str, ...] = ()
    """Later faults and replacements, while the rest of the plugin stays in use."""

    @property
    def key(self) -> str:
        """Distinguishes this plugin from one of another distribution with the same name."""
        return f"{self.distribution}:{self.name}"

    @property
    def ours(self) -> bool:
        return self.distribution == FIRST_PARTY

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"
