"""Texts of which vectors or scores are wanted: progress through them, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import RequestFailed
from ..protocol.events import Embedded, Scored
from ..records import LoadedModel, Pooling, PrefillChunk, Prompt, ShowsHidden


class Inputs(ABC):
    """Inputs run one after the other, each in its own cache."""

    def __init__(self, tokens: Sequence[Sequence[int]], shared: int = 0) -> None:
        """`shared`: tokens with which every input begins. The prefix cache stores these, and none
        that follow. 0: it is not used."""
        self.tokens = tokens
        self.shared = shared
        self.at = 0
        """Index of the current input."""
        self.found: Any = None
        """The current input's result so far, an array."""
        self.cached = 0
        """Tokens of earlier inputs that came from the prefix cache."""
        self.total = sum(map(len, tokens))
        """Tokens of all inputs."""
        self.behind = self.total - len(tokens[0])
        """Tokens of the inputs after the current one."""

    @property
    def longest(self) -> Prompt:
        """The input that needs the most memory."""
        return self.prompt(max(self.tokens, key=len))

    def prompt(self, tokens: Sequence[int]) -> Prompt:
        """The prompt with these tokens."""
        return Prompt(tokens, snapshot_points=(self.shared,) if self.shared else ())

    @property
    def left(self) -> bool:
        """Whether an input is left to run."""
        return self.at < len(self.tokens)

    @abstractmethod
    def run(self, model: LoadedModel, chunk: PrefillChunk) -> None:
        """Append a chunk of the input to its cache, and take its part of the result."""

    @abstractmethod
    def result(self) -> Embedded | Scored:
        """The current input's result. Raises `RequestFailed` if it is not finite."""

    def finish(self) -> Embedded | Scored:
        """The current input's result. Moves to the next input. Raises like `result`."""
        result = self.result()
        self.at += 1
        self.behind -= len(self.tokens[self.at]) if self.left else 0
        return result


class Vectors(Inputs):
    """Texts to embed. The prefix cache is not used."""

    def __init__(
        self,
        tokens: Sequence[Sequence[int]],
        pooling: Pooling,
        dimensions: int,
        normalise: bool,
    ) -> None:
        """`dimensions`: length of each vector."""
        super().__init__(tokens)
        self.pooling = pooling
        self.dimensions = dimensions
        self.normalise = normalise

    def run(self, model: LoadedModel, chunk: PrefillChunk) -> None:
        """It requests no logits, so none are computed. `found` are pooled states, (hidden,)
        float32."""
        size, ends = chunk.stop - chunk.start, chunk.stop == len(chunk.prompt.tokens)
        wanted = {"mean": size, "cls": size if chunk.start == 0 else 0, "last": int(ends)}
        states = _states(model, chunk, wanted[self.pooling])
        if states is not None:
            self._pool(states.astype(mx.float32))

    def result(self) -> Embedded:
        vector = np.array(self.found)
        if not np.isfinite(vector).all():
            raise RequestFailed(f"the model gives no finite vector for input {self.at}")
        if self.pooling == "mean":
            vector /= len(self.tokens[self.at])
        cut = shortened(vector, self.dimensions, normalise=self.normalise)
        return Embedded(index=self.at, vector=encoded(cut))

    def _pool(self, states: mx.array) -> None:
        if self.pooling == "cls":
            self.found = states[0]
        elif self.pooling == "last" or self.found is None:
            self.found = states.sum(axis=0)
        else:
            self.found = self.found + states.sum(axis=0)


class Scores(Inputs):
    """Prompts to score by the logits of tokens after them."""

    def __init__(
        self, tokens: Sequence[Sequence[int]], shared: int, yes: int, no: int | None
    ) -> None:
        super().__init__(tokens, shared)
        self.yes = yes
        self.no = no

    def run(self, model: LoadedModel, chunk: PrefillChunk) -> None:
        """`found` is the score, () float32."""
        logits = model.prefill(chunk)
        if chunk.stop == len(chunk.prompt.tokens):
            logits = logits.astype(mx.float32)
            self.found = mx.sigmoid(logits[self.yes] - (0 if self.no is None else logits[self.no]))

    def result(self) -> Scored:
        score = float(self.found.item())
        if not np.isfinite(score):
            raise RequestFailed(f"the model gives no finite score for document {self.at}")
        return Scored(index=self.at, score=score)


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
