"""What is known of one installed plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..records import UpstreamPatch

FIRST_PARTY = "mlx-provider"
"""The distribution whose plugins a third party may replace."""


@dataclass(frozen=True)
class Plugin:
    """One entry point: where it comes from, what it brings, and why it is off, if it is."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    records: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of its records by kind (`model family`, `tool parser`, `kernels` ...)."""
    patches: tuple[UpstreamPatch, ...] = ()
    """What of upstream it replaces."""
    error: str | None = None
    """Why nothing of this plugin is in use."""
    notes: tuple[str, ...] = ()
    """What went wrong or was replaced later, while the rest of the plugin stays in use."""

    @property
    def key(self) -> str:
        """Tells this plugin from another distribution's plugin of the same name."""
        return f"{self.distribution}:{self.name}"

    @property
    def ours(self) -> bool:
        return self.distribution == FIRST_PARTY

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"
