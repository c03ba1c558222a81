"""How the hidden states of a text become its vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Pooling = Literal["last", "mean", "cls"]
"""The state of the last token, the mean of all states, or the state of the first token."""


@dataclass(frozen=True)
class Embedding:
    """A model's vectors. Its states are those of a `ShowsHidden`."""

    width: int = 0
    """Dimensions of a vector."""
    pooling: Pooling | None = None
    """`None`: the model's files do not say; the operator must choose."""
    normalise: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that go before an input, by the name that a client gives."""
    default_prompt: str = ""
    """Name of the default prompt; empty: none."""
    refusal: str = ""
    """Why it cannot embed; empty: it can."""
