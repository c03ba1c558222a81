"""Reference rows that run alone: their logits, and the tolerance for other layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel, PrefillChunk, Prompt
from ..memory import arrays
from . import noise

STEPS = 4
"""Tokens that a row decodes."""
EQUAL = 4
"""Equal rows for the measurement of the noise."""
EQUAL_STEPS = 3
"""Tokens that the equal rows decode."""
TIMES = 2
"""For the same purpose, a prompt runs alone in chunks this many times."""
CHUNK_START = 3
"""Tokens before the first mixed chunk: few, so that each token that is wrongly seen or not seen
matters."""
CHUNKS = (5, 4)
"""Sizes of the mixed chunks. The second must see the tokens of the first."""
CHUNK_ENDS = tuple(itertools.accumulate(CHUNKS, initial=CHUNK_START))[1:]
CHUNK_STEPS = 2
"""Tokens that the row of the chunks decodes after them."""
CHUNKED_LENGTH = CHUNK_ENDS[-1] + CHUNK_STEPS

MakeCache = Callable[[], list[Any]]
ByStep = Sequence[mx.array]
"""Logits (vocab,) of one row, step by step."""


@dataclass(frozen=True)
class SoloRow:
    """A row that runs alone."""

    tokens: list[int]
    """The prompt."""
    cache: list[Any]
    """The cache before the first step. Each run uses a copy."""
    logits: ByStep
    bound: float
    """See `noise.bound`."""

    def problem(self, found: ByStep) -> str:
        """What is wrong with the logits of its first or all steps in a batch. Empty: nothing.

        Needs two steps.
        """
        differs = noise.lasting([noise.spread(*pair) for pair in self._pairs(found)])
        if differs <= self.bound and math.isfinite(differs):
            return ""
        return (
            f"log-probabilities differ from solo by {differs:.3g}, where the device's rounding "
            f"explains {self.bound:.3g}"
        )

    def widest(self, found: ByStep) -> float:
        """Largest difference of the log-probabilities of likely tokens in a batch."""
        return max(noise.widest(*pair) for pair in self._pairs(found))

    def _pairs(self, found: ByStep) -> list[tuple[mx.array, mx.array]]:
        return list(zip(self.logits, found, strict=False))


def decoding(
    model: LoadedModel, make_cache: MakeCache, tokens: list[int], rope_delta: int
) -> SoloRow:
    """A row that decodes the first tokens of its prompt again."""
    cache, first = prefilled(model, make_cache, tokens), len(tokens) + rope_delta
    alone = decoded(model, deepcopy(cache), tokens[:STEPS], first)
    equal: list[ByStep] = []
    with Isolation():
        copies = noise.copies(cache, EQUAL)
        several = _decoded(model, copies, tokens[:EQUAL_STEPS], first, EQUAL)
        equal = list(zip(*several, strict=True))
    return SoloRow(tokens, cache, alone, _bound(model, alone, equal))


def chunked(model: LoadedModel, make_cache: MakeCache, tokens: list[int]) -> SoloRow:
    """A row with its prompt in `CHUNKS`. A step is the end of a chunk, then each decoded token.

    Alone it runs token by token. Its noise is the difference of chunks that run alone.
    """
    cache = prefilled(model, make_cache, tokens[:CHUNK_START])
    ends = [CHUNK_START, *CHUNK_ENDS]
    by_token = decoded(model, deepcopy(cache), tokens[CHUNK_START:], CHUNK_START)
    alone = [by_token[end - CHUNK_START - 1] for end in ends[1:]]
    alone += by_token[ends[-1] - CHUNK_START :]
    others = [_in_chunks(model, noise.copies(cache, 1, i), tokens, ends) for i in range(TIMES)]
    return SoloRow(tokens, cache, alone, _bound(model, alone, others))


def _in_chunks(
    model: LoadedModel, cache: list[Any], tokens: list[int], ends: Sequence[int]
) -> list[mx.array]:
    found = [
        model.prefill(PrefillChunk(Prompt(tokens), start, stop, cache))
        for start, stop in itertools.pairwise(ends)
    ]
    return found + decoded(model, cache, tokens[ends[-1] :], ends[-1])


def prefilled(model: LoadedModel, make_cache: MakeCache, tokens: list[int]) -> list[Any]:
    """A row cache after a prompt."""
    cache = make_cache()
    model.prefill(PrefillChunk(Prompt(tokens), 0, len(tokens), cache))
    mx.eval(arrays(cache))
    return cache


def some_tokens(model: LoadedModel, length: int, start: int) -> list[int]:
    """Ids spread over the vocabulary, without end-of-reply tokens."""
    usable = max(2, model.info.vocab_size)
    ids = ((7919 * (i + 1) + 104729 * start) % usable for i in range(2 * length))
    return [i for i in ids if i not in model.info.stop_tokens][:length]


def decoded(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], first: int
) -> list[mx.array]:
    """Logits (vocab,) after each token, one by one. `first`: position of the first token."""
    return [logits[0] for logits in _decoded(model, cache, tokens, first, 1)]


def _decoded(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], first: int, rows: int
) -> list[mx.array]:
    """Like `decoded`, (rows, vocab) of equal rows."""
    found = []
    for position, token in enumerate(tokens, first):
        ids, at = (mx.array([each] * rows, dtype=mx.int32) for each in (token, position))
        logits = model.decode(ids, cache, at)
        mx.eval(logits)
        found.append(logits)
    return found


def _bound(model: LoadedModel, alone: ByStep, equal: Sequence[ByStep]) -> float:
    spreads = [noise.spread(*pair) for row in equal for pair in zip(alone, row, strict=False)]
    contexts = [noise.spread(*pair) for pair in itertools.pairwise(alone)]
    return noise.bound(model.info.precision, spreads, contexts)
