"""A scorer whose scores are known, and an engine that thins long prompts out by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.sparse_prefill import SparsePrefill
from mlx_provider.testing.driver import new_engine

LEAST = 256
"""Tokens from which on a prompt is long."""


class Scripted:
    """See `ScoresPrompts`: chunks of a prompt matter in an order that its tokens settle."""

    longest_scored = 10_000
    scored_token_bytes = 1

    def __init__(self, pieces: int = 3) -> None:
        """`pieces`: that a prompt takes."""
        self.pieces = pieces
        self.begun = 0
        """Prompts."""

    def scoring(self, tokens: Sequence[int]) -> ScriptedScoring:
        self.begun += 1
        return ScriptedScoring(self, tokens)

    def scores(self, tokens: Sequence[int]) -> Any:
        """(tokens,)"""
        ids = np.asarray(tokens)
        return ((ids * 7919 + np.arange(len(ids)) // 32 * 104729) % 1009).astype(np.float32)


class ScriptedScoring:
    """One prompt's."""

    def __init__(self, scorer: Scripted, tokens: Sequence[int]) -> None:
        self._scorer, self._tokens, self._done = scorer, tokens, 0

    def advance(self) -> NDArray[np.float32] | None:
        """The scores, at the last piece."""
        self._done += 1
        found: NDArray[np.float32] = self._scorer.scores(self._tokens)
        return found if self._done >= self._scorer.pieces else None


def thinning(model: Any, scorer: Any = None, *, share: float = 0.5, **more: Any) -> Engine:
    """An engine that leaves tokens out of prompts from `LEAST` on; no time passes."""
    sparse = SparsePrefill(scorer or Scripted(), share=share, least=LEAST, clock=lambda: 0.0)
    given = {"mixes": True, "sparse_prefill": sparse, "clock": lambda: 0.0, **more}
    return new_engine(model, **given)
