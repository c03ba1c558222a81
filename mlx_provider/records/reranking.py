"""How a model judges whether a document answers a query."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Judge = Callable[[str, str, str | None], Sequence[Mapping[str, Any]]]
"""Maps a query, a document and an instruction to messages for the chat template. `None`: the
model's own instruction."""


@dataclass(frozen=True)
class Reranking:
    """A score is the probability of one token against another, after a prompt that asks."""

    messages: Judge
    yes: int
    """Token of a document that answers the query."""
    no: int | None = None
    """Token of one that does not. `None`: the score is the sigmoid of the other's logit."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
