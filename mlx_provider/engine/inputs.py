"""Texts whose vectors a request wants: where it stands, and the pooling of their states."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import RequestFailed
from ..records import LoadedModel, Pooling, PrefillChunk, Prompt, ShowsHidden


@dataclass(eq=False)
class Inputs:
    """Run one after the other, each in a cache of its own, which nobody keeps."""

    tokens: Sequence[Sequence[int]]
    pooling: Pooling
    dimensions: int
    """Numbers of each vector that are wanted."""
    normalise: bool
    at: int = 0
    """The input that runs."""
    pooled: Any = None
    """Of its states so far, (hidden,) float32."""

    def __post_init__(self) -> None:
        self.total = sum(map(len, self.tokens))
        """Tokens of all inputs,"""
        self.behind = self.total - len(self.tokens[0])
        """and of those after the one that runs."""

    @property
    def longest(self) -> Prompt:
        """The input that takes the most memory."""
        return Prompt(max(self.tokens, key=len))

    def run(self, model: LoadedModel, chunk: PrefillChunk) -> None:
        """Append a chunk of the input to its cache, and what matters of its states to `pooled`.

        Logits are nowhere asked for, so that none are computed.
        """
        size, ends = chunk.stop - chunk.start, chunk.stop == len(chunk.prompt.tokens)
        wanted = {"mean": size, "cls": size if chunk.start == 0 else 0, "last": int(ends)}
        states = _states(model, chunk, wanted[self.pooling])
        if states is not None:
            self._pool(states.astype(mx.float32))

    def finish(self) -> str:
        """The vector of the input, in base64; the next one is to run.

        Raises `RequestFailed` where it is none.
        """
        vector = np.array(self.pooled)
        if not np.isfinite(vector).all():
            raise RequestFailed(f"the model gives no finite vector for input {self.at}")
        if self.pooling == "mean":
            vector /= len(self.tokens[self.at])
        self.at += 1
        self.behind -= len(self.tokens[self.at]) if self.left else 0
        return encoded(shortened(vector, self.dimensions, normalise=self.normalise))

    @property
    def left(self) -> bool:
        """Whether there is one to run."""
        return self.at < len(self.tokens)

    def _pool(self, states: mx.array) -> None:
        if self.pooling == "cls":
            self.pooled = states[0]
        elif self.pooling == "last" or self.pooled is None:
            self.pooled = states.sum(axis=0)
        else:
            self.pooled = self.pooled + states.sum(axis=0)


def shortened(
    vector: NDArray[np.float32], dimensions: int, *, normalise: bool
) -> NDArray[np.float32]:
    """Its first numbers; `normalise`: of length 1."""
    cut = vector[:dimensions].astype(np.float64)
    length = np.linalg.norm(cut)
    return (cut / length if normalise and length else cut).astype(np.float32)


def encoded(vector: NDArray[np.float32]) -> str:
    """float32, the lowest byte first, in base64."""
    return b64encode(vector.astype("<f4").tobytes()).decode()


def _states(model: LoadedModel, chunk: PrefillChunk, last: int) -> mx.array | None:
    """States (last, hidden) after the chunk's last tokens."""
    if not last:
        model.prefill(chunk)
        return None
    if not isinstance(model, ShowsHidden):
        raise RequestFailed("the model shows no hidden states")
    return model.prefill_hidden(chunk, last)[1]
