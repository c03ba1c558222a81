"""Texts to embed: progress through them, and pooling of their states."""

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
    """Inputs run one after the other, each in its own cache, which is not stored."""

    tokens: Sequence[Sequence[int]]
    pooling: Pooling
    dimensions: int
    """Length of each vector."""
    normalise: bool
    at: int = 0
    """Index of the current input."""
    pooled: Any = None
    """Pooled states of the current input so far, (hidden,) float32."""

    def __post_init__(self) -> None:
        self.total = sum(map(len, self.tokens))
        """Tokens of all inputs."""
        self.behind = self.total - len(self.tokens[0])
        """Tokens of the inputs after the current one."""

    @property
    def longest(self) -> Prompt:
        """The input that needs the most memory."""
        return Prompt(max(self.tokens, key=len))

    def run(self, model: LoadedModel, chunk: PrefillChunk) -> None:
        """Append a chunk of the input to its cache, and pool its states.

        It requests no logits, so none are computed.
        """
        size, ends = chunk.stop - chunk.start, chunk.stop == len(chunk.prompt.tokens)
        wanted = {"mean": size, "cls": size if chunk.start == 0 else 0, "last": int(ends)}
        states = _states(model, chunk, wanted[self.pooling])
        if states is not None:
            self._pool(states.astype(mx.float32))

    def finish(self) -> str:
        """The vector of the current input in base64. Moves to the next input.

        Raises `RequestFailed` if the vector is not finite.
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
        """Whether an input is left to run."""
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
    """The first `dimensions` numbers; `normalise`: scaled to length 1."""
    cut = vector[:dimensions].astype(np.float64)
    length = np.linalg.norm(cut)
    return (cut / length if normalise and length else cut).astype(np.float32)


def encoded(vector: NDArray[np.float32]) -> str:
    """Little-endian float32 in base64."""
    return b64encode(vector.astype("<f4").tobytes()).decode()


def _states(model: LoadedModel, chunk: PrefillChunk, last: int) -> mx.array | None:
    """Hidden states (last, hidden) after the last tokens of the chunk."""
    if not last:
        model.prefill(chunk)
        return None
    if not isinstance(model, ShowsHidden):
        raise RequestFailed("the model shows no hidden states")
    return model.prefill_hidden(chunk, last)[1]
