"""What prompts compute besides tokens: vectors of texts to embed, and features of media, cached."""

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

Vector = NDArray[np.float32]


@dataclass(eq=False)
class Inputs:
    """Texts to embed: one after the other, each in its own cache, without the prefix cache."""

    tokens: Sequence[Sequence[int]]  # of each text, of which there is at least one
    pooling: Pooling
    dimensions: int  # length of the vectors
    normalise: bool
    at: int = 0  # index of the current text, the *input*
    found: mx.array | None = None  # pooled states of the current input so far, (hidden,) float32

    def __post_init__(self) -> None:
        self.total = sum(map(len, self.tokens))
        self.later_tokens = self.total - len(self.tokens[0])  # of the texts after the current one

    @property
    def longest(self) -> Prompt:
        return Prompt(max(self.tokens, key=len))

    @property
    def left(self) -> bool:
        """Whether any text is not finished."""
        return self.at < len(self.tokens)

    def run(self, model: LoadedModel, chunk: PrefillChunk) -> None:
        """Append a chunk of the input to its cache and pool its hidden states. Raises
        `RequestFailed` if the model does not give these."""
        size, ends = chunk.stop - chunk.start, chunk.stop == len(chunk.prompt.tokens)
        needed = {"mean": size, "cls": size if chunk.start == 0 else 0, "last": int(ends)}
        last_states = needed[self.pooling]
        if not last_states:
            model.prefill(chunk)
            return
        if not isinstance(model, HiddenStatesModel):
            raise RequestFailed("the model shows no hidden states")
        self._pool(model.prefill_hidden(chunk, last_states)[1].astype(mx.float32))

    def finish(self) -> Embedded:
        """Return the vector of the input, whose chunks have all run, and move to the next one.
        Raises `RequestFailed` if the vector is not finite."""
        vector = np.array(self.found)
        if not np.isfinite(vector).all():
            raise RequestFailed(f"the model gives no finite vector for input {self.at}")
        if self.pooling == "mean":
            vector /= len(self.tokens[self.at])
        cut = shorten(vector, self.dimensions, normalise=self.normalise)
        data = b64encode(cut.astype("<f4").tobytes())  # little-endian
        result = Embedded(index=self.at, vector=data.decode())
        self.at, self.found = self.at + 1, None
        self.later_tokens -= len(self.tokens[self.at]) if self.left else 0
        return result

    def _pool(self, states: mx.array) -> None:
        pooled = states[0] if self.pooling == "cls" else states.sum(axis=0)
        if self.pooling == "mean" and self.found is not None:
            pooled = self.found + pooled
        self.found = pooled


def shorten(vector: Vector, dimensions: int, *, normalise: bool) -> Vector:
    """The first `dimensions` numbers; with `normalise`, scaled to length 1."""
    cut = vector[:dimensions].astype(np.float64)
    length = np.linalg.norm(cut)
    return (cut / length if normalise and length else cut).astype(np.float32)


Key = tuple[str, str]
"""(salt, content hash). With the salt, because the time of an answer tells if an image was seen."""


class FeatureCache:
    """Keeps the features used last, in `budget` bytes. Engine thread only, except for `in`."""

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
        """Store features, which are evaluated for that, unless they are larger than the budget."""
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
    """Bytes of all their arrays, which this evaluates."""
    tree = vars(features) if hasattr(features, "__dict__") else features
    found = [a for _, a in tree_flatten(tree) if isinstance(a, mx.array)]
    mx.eval(found)
    return sum(a.nbytes for a in found)
