"""Scores prompt tokens by the attention of a smaller model at the beginning of its answer. After
SpecPrefill (arXiv 2502.02789): the model reads the prompt, then writes some tokens. A token's score
is the maximum attention of any head of any layer, averaged over the written tokens and the last
prompt token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_provider import PrefillChunk, Prompt
from mlx_provider.families.caches import KVCache
from mlx_provider.families.layers import watch_attention
from mlx_provider.families.text import TextModel
from mlx_provider.records import DraftRow

LOOKS = 8  # queries of the score: the prompt's last token, and the written ones
PIECE, SHALLOW, MIN_CHUNK_TOKENS = 512, 4096, 128
"""A pass has `PIECE` tokens up to the depth `SHALLOW`, and half as many each time the depth has
doubled, as attention takes most time there. Below the minimum, reading the weights would."""


def watched_layers(cache: Sequence[Any]) -> list[Any]:
    """Layers that hold every token, whose attention can be measured."""
    return [layer for layer in cache if type(layer) is KVCache]


def piece(start: int) -> int:
    """Maximum tokens of the pass that begins after `start` tokens."""
    depth, size = SHALLOW, PIECE
    while start >= depth and size > MIN_CHUNK_TOKENS:
        depth, size = 2 * depth, size // 2
    return size


def passes(tokens: int) -> list[tuple[int, int]]:
    """(tokens, tokens before them) of each pass that scores a prompt of `tokens` tokens."""
    found, start = [], 0
    while start < tokens - 1:
        found.append((min(piece(start), tokens - 1 - start), start))
        start += found[-1][0]
    return found + [(1, tokens - 1 + look) for look in range(LOOKS)]


class ScoringModel:
    """A `Drafting` that `ScoresPrompts` and does not draft. Its caches need not remove tokens."""

    def __init__(self, model: TextModel, vocab: int) -> None:
        self._model = model
        self._shared = min(vocab, model.info.vocab_size)
        """Size of the common vocabulary."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int] | None]:
        return [()] * len(rows)

    @property
    def longest_scored(self) -> int:
        """The model's context; 0 if no layer holds every token."""
        return self._model.info.context_length if watched_layers(self._model.make_cache()) else 0

    @property
    def scored_token_bytes(self) -> int:
        """Bytes in the layers that hold every token."""
        return token_bytes(self._model, KVCache)

    def scoring(self, tokens: Sequence[int]) -> PromptScoring:
        return PromptScoring(self._model, tokens, self._shared)


def token_bytes(model: TextModel, *kinds: type) -> int:
    """Bytes of a token in the cache's layers of these classes. Runs the model on one token."""
    cache = model.make_cache()
    mx.eval(model.prefill(PrefillChunk(Prompt([0]), 0, 1, cache)))
    kept = [layer for layer in cache if type(layer) in kinds]
    return sum((layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2] for layer in kept)


class PromptScoring:
    """A `Scoring` of one prompt. `shared`: size of the common vocabulary."""

    def __init__(self, model: TextModel, tokens: Sequence[int], shared: int) -> None:
        last = model.info.vocab_size - 1
        self._tokens = [min(token, last) for token in tokens]
        self._model, self._shared = model, shared
        self._cache = model.make_cache()
        self._known = 0
        self._looks: list[mx.array] = []  # for each query, the attention to each token, (tokens,)
        self._next = mx.array(self._tokens[-1:])

    def advance(self) -> NDArray[np.float32] | None:
        """Run one pass. Returns the scores, (tokens,), after the last pass, and `None` before."""
        left = len(self._tokens) - 1 - self._known
        if left > 0:
            self._read(min(left, piece(self._known)))
            return None
        self._look()
        if len(self._looks) < LOOKS:
            return None
        return np.array(sum(self._looks[1:], self._looks[0]) / LOOKS)

    def _read(self, count: int) -> None:
        prompt = Prompt(self._tokens)
        stop = self._known + count
        mx.eval(self._model.prefill(PrefillChunk(prompt, self._known, stop, self._cache)))
        self._known = stop

    def _look(self) -> None:
        look = Look(len(self._tokens))
        with watch_attention(self._model.model, look.add):
            logits = self._model.model(self._next[None], cache=self._cache)[0, -1]
        self._next = mx.argmax(logits[: self._shared], keepdims=True)
        mx.eval(self._next, look.most)
        self._looks.append(look.most)


class Look:
    """The attention of one query, from all layers."""

    def __init__(self, tokens: int) -> None:
        self.most = mx.zeros(tokens)  # maximum of all heads so far, (tokens,)

    def add(self, queries: mx.array, keys: mx.array, cache: Any, scale: float) -> None:
        """Add one layer, if it holds every token: queries (1, H, 1, D), keys (1, Hk, S, D)."""
        if type(cache) is not KVCache:
            return
        heads, groups = queries.shape[1], keys.shape[1]
        grouped = queries[0].reshape(groups, heads // groups, -1)
        weights = mx.softmax((grouped * scale) @ keys[0].swapaxes(1, 2), axis=-1, precise=True)
        seen = mx.max(weights.astype(mx.float32), axis=(0, 1))
        self.most = mx.maximum(self.most, seen[: self.most.size])
