"""How the states of a text become its vector, as a model's files and its family tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Pooling = Literal["last", "mean", "cls"]
"""Which states make the vector: the last token's, the mean of all, the first token's."""


@dataclass(frozen=True)
class Embedding:
    """What is known of a model's vectors. Its states are those that a `ShowsHidden` hands out."""

    width: int = 0
    """Numbers of a whole vector."""
    pooling: Pooling | None = None
    """`None`: its files do not say, and it embeds only where its operator does."""
    normalise: bool = True
    """Vectors have length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts to put before an input, by the name that a client gives."""
    default_prompt: str = ""
    """Name of the one that is taken where a client names none; empty: none is."""
    refusal: str = ""
    """Why it cannot embed, whatever an operator says; empty: it can."""
