"""What a prompt computes beside its tokens: a cache of the features of its media, and the vectors
of texts to embed."""

from base64 import b64encode
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from ..errors import RequestFailed
from ..protocol.events import Embedded
from ..records import Features, HiddenStatesModel, LoadedModel, Pooling, PrefillChunk, Prompt


@dataclass(eq=False)
class Inputs:
    """Texts to embed: one after the other, each in its own cache, without the prefix cache."""

    tokens: Sequence[Sequence[int]]
    pooling: Pooling
    dimensions: int
    normalise: bool
    at: int = 0
    found: mx.array | None = None
    """Pooled states of the current input so far, (hidden,) float32."""

    def __post_init__(self) -> None:
        self.total = sum(map(len, self.tokens))
        self.later_tokens = self.total - len(self.tokens[0])

    @property
    def longest(self) -> Prompt:
        return Prompt(max(self.tokens, key=len))

    @property
    def left(self) -> bool:
        return self.at < len(self.tokens)

    def run(self, model: LoadedModel, chunk: PrefillChunk) -> None:
        """Append a chunk of the input to its cache and pool its states. Requests no logits."""
        size, ends = chunk.stop - chunk.start, chunk.stop == len(chunk.prompt.tokens)
        wanted = {"mean": size, "cls": size if chunk.start == 0 else 0, "last": int(ends)}
        last = wanted[self.pooling]
        if not last:
            model.prefill(chunk)
            return
        if not isinstance(model, HiddenStatesModel):
            raise RequestFailed("the model shows no hidden states")
        self._pool(model.prefill_hidden(chunk, last)[1].astype(mx.float32))

    def finish(self) -> Embedded:
        """Moves to the next input. Raises `RequestFailed` if the vector is not finite."""
        vector = np.array(self.found)
        if not np.isfinite(vector).all():
            raise RequestFailed(f"the model gives no finite vector for input {self.at}")
        if self.pooling == "mean":
            vector /= len(self.tokens[self.at])
        cut = shorten(vector, self.dimensions, normalise=self.normalise)
        data = b64encode(cut.astype("<f4").tobytes())  # little-endian
        result = Embedded(index=self.at, vector=data.decode())
        self.at += 1
        self.later_tokens -= len(self.tokens[self.at]) if self.left else 0
        return result

    def _pool(self, states: mx.array) -> None:
        if self.pooling == "cls":
            self.found = states[0]
        elif self.pooling == "last" or self.found is None:
            self.found = states.sum(axis=0)
        else:
            self.found = self.found + states.sum(axis=0)


def shorten(
    vector: NDArray[np.float32], dimensions: int, *, normalise: bool
) -> NDArray[np.float32]:
    cut = vector[:dimensions].astype(np.float64)
    length = np.linalg.norm(cut)
    return (cut / length if normalise and length else cut).astype(np.float32)


Key = tuple[str, str]
"""Salt, because the time of an answer tells whether an image was seen, and content hash."""


class FeatureCache:
    """An LRU cache. Engine thread only; other threads may use `in`."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._kept: OrderedDict[Key, tuple[Features, int]] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def get(self, key: Key) -> Features | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: Key, features: Features) -> None:
        """Evaluates them. Features larger than the budget are not stored."""
        size = features_bytes(features)
        if size > self._budget or key in self._kept:
            return
        self._kept[key] = (features, size)
        self.nbytes += size
        while self.nbytes > self._budget:
            _, (_, dropped) = self._kept.popitem(last=False)
            self.nbytes -= dropped

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0


def features_bytes(features: Features) -> int:
    """Evaluates the arrays."""
    tree = vars(features) if hasattr(features, "__dict__") else features
    found = [a for _, a in tree_flatten(tree) if isinstance(a, mx.array)]
    mx.eval(found)
    return sum(a.nbytes for a in found)
