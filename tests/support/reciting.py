"""A model whose words are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_provider.records import PrefillChunk
from wrapped_model import WrappedModel


@dataclass
class Reciting(WrappedModel):
    """A model that mostly says a text: at each position the token that stands there is likelier."""

    text: Sequence[int]
    likelier: float = 12.0

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        return self._pulled(self.inner.prefill(chunk), mx.array(chunk.stop))

    def decode(
        self, tokens: mx.array, cache: list[Any], positions: mx.array, at: mx.array | None = None
    ) -> mx.array:
        next_ones = positions + 1 if at is None else positions[at] + 1
        return self._pulled(self.inner.decode(tokens, cache, positions, at), next_ones)

    def _pulled(self, logits: mx.array, positions: mx.array) -> mx.array:
        said = mx.array(self.text)[mx.minimum(positions, len(self.text) - 1)]
        return logits + self.likelier * (mx.arange(logits.shape[-1]) == said[..., None])
