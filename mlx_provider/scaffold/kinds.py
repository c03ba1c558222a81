"""What kinds of plugins there is a template for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of record that a plugin may bring."""

    option: str
    """On the command line, without dashes; also the folder of its template."""
    record: str
    """What the registry calls such a record, and people."""
    about: str
    """What the template brings, in one line."""


KINDS = {
    kind.option: kind
    for kind in (
        Kind("family", "model family", "An architecture in mlx-lm's terms"),
        Kind("tool-parser", "tool parser", "How a model writes tool calls"),
        Kind("reasoning-parser", "reasoning parser", "How a model marks its thoughts"),
        Kind("drafter", "drafter", "Who guesses what is said next"),
        Kind("kernels", "kernels", "A faster function for a device"),
    )
}
"""By option."""
