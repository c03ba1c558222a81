"""The kinds of plugins with a template."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    option: str
    """Option of the command line without dashes, and folder of the template."""
    record: str
    """The registry's name of the record."""
    about: str
    """The template's content, in one line."""


KINDS = {
    kind.option: kind
    for kind in (
        Kind("family", "model family", "An architecture in mlx-lm's terms"),
        Kind("tool-parser", "tool parser", "How a model writes tool calls"),
        Kind("reasoning-parser", "reasoning parser", "How a model marks its thoughts"),
        Kind("drafter", "drafter", "A drafter, which guesses tokens"),
        Kind("kernels", "kernels", "A faster function for a device"),
    )
}
