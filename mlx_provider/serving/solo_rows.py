"""Reference rows that run alone: their logits, and the tolerance for other layouts.

Kernels for other batch widths sum in another order, and layers amplify the rounding by a factor
that depends on the model, so no fixed tolerance separates it from a wrong mask or offset. Three
properties do: equal rows in one batch without padding differ only by rounding; a real error shows
in more than one step, and moves all likely tokens, not only one."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from ..engine.row_cache import arrays
from ..isolation import attempt
from ..records import LoadedModel, PrefillChunk, Prompt
from ..upstream.cache_classes import layers_of

STEPS = 4
"""Tokens that a row decodes."""
EQUAL, EQUAL_STEPS = 4, 3
"""Equal rows for the measurement of the noise, and the tokens that they decode."""
TIMES = 2
"""For the same purpose, a prompt runs alone in chunks this many times."""
CHUNKS = (3, 8, 12)
"""Tokens before the first mixed chunk, few, so that each of them matters; ends of the chunks."""

MakeCache = Callable[[], list[Any]]
ByStep = Sequence[mx.array]
"""Logits (vocab,) of one row, step by step."""
LIKELY = 64
"""Number of the likeliest tokens of the row alone whose log-probabilities are compared."""


@dataclass(frozen=True)
class SoloRow:
    tokens: list[int]  # the prompt
    cache: list[Any]
    """The cache before the first step. Each run uses a copy."""
    logits: ByStep
    bound: float  # see `rounding_bound`
    rope_delta: int = 0

    def problem(self, found: ByStep) -> str:
        """What is wrong with `found`, the logits of its first two or more steps in a batch. Only a
        difference that two steps show is an error. Empty: nothing."""
        differs = sorted(spread(*pair) for pair in zip(self.logits, found, strict=False))[-2]
        if differs <= self.bound and math.isfinite(differs):
            return ""
        explained = f"where the device's rounding explains {self.bound:.3g}"
        return f"log-probabilities differ from solo by {differs:.3g}, {explained}"

    def widest(self, found: ByStep) -> float:
        """Largest difference of the log-probabilities of likely tokens in a batch."""
        pairs = zip(self.logits, found, strict=False)
        return max(_number(mx.max(mx.abs(_differences(*pair)))) for pair in pairs)


def decoding_row(
    model: LoadedModel, make_cache: MakeCache, tokens: list[int], rope_delta: int
) -> SoloRow:
    """A row that decodes the first tokens of its prompt again."""
    cache, first = prefill(model, make_cache(), tokens), len(tokens) + rope_delta
    alone = decode_each(model, copy.deepcopy(cache), tokens[:STEPS], first)
    several = attempt(
        lambda: _decode_equal(model, copies(cache, EQUAL), tokens[:EQUAL_STEPS], first, EQUAL)
    )
    equal = list(zip(*several, strict=True)) if isinstance(several, list) else []
    return SoloRow(tokens, cache, alone, rounding_bound(model, alone, equal), rope_delta)


def chunked_row(model: LoadedModel, make_cache: MakeCache, tokens: list[int]) -> SoloRow:
    """A row with its prompt in chunks. A step is the end of a chunk, then each decoded token. Alone
    it runs token by token. Its noise is the difference of chunks that run alone."""
    start, *ends = CHUNKS
    cache = prefill(model, make_cache(), tokens[:start])
    by_token = decode_each(model, copy.deepcopy(cache), tokens[start:], start)
    steps = (*ends, *range(ends[-1] + 1, len(tokens) + 1))
    alone = [by_token[end - start - 1] for end in steps]
    others = [in_chunks(model, copies(cache, 1, i), tokens, ends, start) for i in range(TIMES)]
    return SoloRow(tokens, cache, alone, rounding_bound(model, alone, others))


def in_chunks(
    model: LoadedModel, cache: list[Any], tokens: list[int], ends: Sequence[int], start: int = 0
) -> list[mx.array]:
    """Logits (vocab,) at the ends of chunks from `start` on, and of each token decoded after them:
    the rest of `tokens`, or else the first again."""
    found, stop = [], 0
    for first, stop in itertools.pairwise([start, *ends]):
        found.append(model.prefill(PrefillChunk(Prompt(tokens), first, stop, cache)))
        mx.eval(found[-1], arrays(cache))
    return found + decode_each(model, cache, tokens[stop:] or tokens[:STEPS], stop)


def prefill(model: LoadedModel, cache: list[Any], tokens: list[int], start: int = 0) -> list[Any]:
    """Add the tokens from `start` on to a row cache that has those before. Returns the cache."""
    model.prefill(PrefillChunk(Prompt(tokens), start, len(tokens), cache))
    mx.eval(arrays(cache))
    return cache


def some_tokens(model: LoadedModel, length: int, seed: int) -> list[int]:
    """Ids spread over the vocabulary, without end-of-reply tokens; fewer if it is tiny."""
    usable = max(2, model.info.vocab_size)
    ids = ((7919 * (i + 1) + 104729 * seed) % usable for i in range(2 * length))
    return [i for i in ids if i not in model.info.stop_tokens][:length]


def timed_pass(model: LoadedModel, cache: list[Any], start: int, width: int) -> tuple[float, int]:
    """Seconds of a pass over `width` tokens, and the most bytes of its temporary arrays."""
    prompt = Prompt(some_tokens(model, start + width, 0))
    mx.reset_peak_memory()
    began = perf_counter()
    mx.eval(model.prefill(PrefillChunk(prompt, start, start + width, cache)), arrays(cache))
    return perf_counter() - began, max(0, mx.get_peak_memory() - mx.get_active_memory())


def decode_each(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], first: int
) -> list[mx.array]:
    """Logits (vocab,) after each token, one by one. `first`: position of the first token."""
    return [logits[0] for logits in _decode_equal(model, cache, tokens, first, 1)]


def _decode_equal(
    model: LoadedModel, cache: list[Any], tokens: Sequence[int], first: int, rows: int
) -> list[mx.array]:
    """Like `decode_each`, (rows, vocab) of equal rows."""
    found = []
    for position, token in enumerate(tokens, first):
        ids, at = (mx.array([number] * rows, dtype=mx.int32) for number in (token, position))
        logits = model.decode(ids, cache, at)
        mx.eval(logits)
        found.append(logits)
    return found


MULTIPLE = 4.0
"""A difference above this multiple of the noise is an error. In random models of 36 layers
(bfloat16 and 4 bit), noise reaches 2.1 times, and the smallest of a dozen layout errors 8 times."""
REACH = 0.25
"""Highest bound, as a share of the difference of two positions: more would hide errors."""
UNMEASURED = 0.05
"""The bound if equal rows cannot run, as the same share."""
HARMLESS = {"float32": 1e-3, "low": 0.02}
"""Differences that never count as errors, because a few steps may show little noise by chance."""


def rounding_bound(model: LoadedModel, alone: ByStep, equal: Sequence[ByStep]) -> float:
    """The largest difference at which a row still counts as the same as alone. `equal`: logits of
    equal rows, which differ by noise; empty if they could not run."""
    noise = [spread(*pair) for row in equal for pair in zip(alone, row, strict=False)]
    contexts = [spread(*pair) for pair in itertools.pairwise(alone)]
    reach = sum(contexts) / len(contexts)
    explained = UNMEASURED * reach
    if noise:
        explained = min(MULTIPLE * sum(noise) / len(noise), REACH * reach)
    return max(HARMLESS[model.info.precision], explained)


def spread(expected: mx.array, found: mx.array) -> float:
    """Root mean square difference of log-probabilities over the tokens likely by `expected`. Both
    are logits (vocab,). Infinite if any of them is not a number."""
    return _number(mx.sqrt(mx.mean(mx.square(_differences(expected, found)))))


MOVED_ONE_IN = 16
"""One of so many values of a copy is rounded the other way; in float32 only half as many."""
SEEDS = 2**20
"""Seeds of a copy, one for each array of the cache."""


def copies(cache: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
    """A row cache repeated for `count` equal rows, with a few values rounded the other way, because
    padding alone may change the order of a sum. `seed` chooses the values."""
    copied, seeds = copy.deepcopy(list(cache)), itertools.count(SEEDS * seed)
    for layer in layers_of(copied):
        layer.state = tree_map(lambda array: _repeat(array, count, next(seeds)), layer.state)
    return copied


def _repeat(value: Any, count: int, seed: int) -> Any:
    if not isinstance(value, mx.array) or value.ndim < 2:
        return value
    rows = mx.repeat(value, count, axis=0)
    if not mx.issubdtype(value.dtype, mx.floating):
        return rows
    half = mx.finfo(value.dtype).eps / 2
    drawn = mx.random.uniform(-1, 1, rows.shape, key=mx.random.key(seed))
    moved = mx.where(mx.abs(drawn) < 1 / MOVED_ONE_IN, half * mx.sign(drawn), 0.0)
    return (rows.astype(mx.float32) * (1 + moved)).astype(value.dtype)


def _differences(expected: mx.array, found: mx.array) -> mx.array:
    """Of the log-probabilities of likely tokens."""
    logits = (row.astype(mx.float32) for row in (expected, found))
    first, second = (row - mx.logsumexp(row) for row in logits)
    likely = mx.argpartition(-first, min(LIKELY, first.size) - 1)[:LIKELY]
    return first[likely] - second[likely]


def _number(value: mx.array) -> float:
    number: float = value.item()  # type: ignore[assignment]
    return math.inf if math.isnan(number) else number
