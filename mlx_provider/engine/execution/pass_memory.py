"""Measures at load the memory of a running forward pass, beyond that of rows and weights."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...records import LoadedModel, PrefillChunk, Prompt
from ..memory import arrays, leaves, profile
from ..row_cache import grow_by
from ..scheduling.chunking import fixed_sizes, worthwhile
from ..scheduling.costs import Curve

log = logging.getLogger(__name__)

MakeCache = Callable[[], list[Any]]
Reserve = Callable[[int], bool]
"""Reserves bytes for measurements, in place of those reserved before. Returns whether they are
free."""
WIDTHS = (256, 64, 16)
"""Tokens of the wide pass that is measured: the most that run within `BRIEF`."""
BRIEF = 0.6
"""Longest seconds of that pass, so that a slow machine loads fast."""
NARROW = (16, 32)
"""Tokens of the deep passes that are measured. Fewer may run in kernels that keep no scores (mlx
0.32, backend/metal/scaled_dot_product_attention.cpp: `sdpa_vector` takes up to 8)."""
DEPTHS = (2048, 512)
"""Cached tokens before the deep pass. The first depth within the context and the free memory is
used."""


def unlimited(nbytes: int) -> bool:
    return True


@dataclass(frozen=True)
class PassBytes:
    row: float = 0.0
    """Per row that decodes."""
    token: float = 0.0
    """Per further token."""
    pair: float = 0.0
    """Per pair of a new token and a cached one. 0 if attention never stores its scores."""
    key: float = 0.0
    """Per cached token, however many are new. 0 if attention copies no keys and values."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of passes over rows or a chunk, from the measurements and the chunk limits."""

    each: PassBytes
    widest: int
    """Most tokens of a chunk."""
    deepest: Sequence[tuple[int, float]] = field(default=(), repr=False)
    """(tokens of a chunk, largest number of cached tokens before it). A deep chunk is narrow,
    because its time is limited."""
    least: int = 0
    """Tokens that a chunk may always have, however long it takes."""

    @classmethod
    def of(cls, each: PassBytes, curve: Curve, seconds: float, most: int) -> PassMemory:
        sizes = fixed_sizes(most)
        least = worthwhile(sizes, curve.seconds)
        if curve.depths:  # deep in a prompt, attention is most of a pass
            least = max(least, worthwhile(sizes, lambda n: curve.per_key(n) or inf))
        longest = max(seconds, curve.seconds(least))
        widest = bisect_right(range(1, most + 1), longest, key=curve.seconds)
        deepest = [(n, _depth(curve, n, longest)) for n in (*sizes, widest) if n <= widest]
        return cls(each, widest, deepest, least)

    def __call__(self, tokens: int, rows: int) -> int:
        """Bytes of the largest pass of this many rows, or over a prompt of this many tokens."""
        chunk = min(self.widest, tokens)
        pairs = max((min(n, chunk) * min(d, tokens) for n, d in self.deepest), default=0.0)
        pairs = max(pairs, min(self.least, chunk) * tokens)
        each = self.each
        cached = each.pair * pairs + each.key * tokens
        return int(each.row * rows + each.token * max(chunk, rows) + cached)


def _depth(curve: Curve, tokens: int, longest: float) -> float:
    """The largest number of cached tokens at which a chunk of this size takes no longer than
    `longest`."""
    slope, left = curve.per_key(tokens), longest - curve.seconds(tokens)
    return left / slope if slope > 0 else inf


def measure(
    model: LoadedModel, make_cache: MakeCache, curve: Curve, reserve: Reserve = unlimited
) -> PassBytes | None:
    """Measure the memory peaks of passes of `model` on the engine thread. `None`: they failed.
    `reserve`: a pass for whose memory it returns `False` is not run."""
    context = model.info.context_length
    brief = [n for n in WIDTHS if curve.seconds(n) <= BRIEF and n <= context]
    width = min(WIDTHS[-1], context)
    one = several = depth = 0
    behind = [0, 0]
    with Isolation() as tried:
        one = taken(model, first := make_cache(), 0, 1)
        memory, copied = profile(first), copied_bytes(first)
        del first

        def fits(depth: int, width: int) -> bool:
            tokens = depth + width
            return reserve(memory.row_bytes(tokens) + tokens * copied + width * one)

        depths = [n for n in DEPTHS if n + NARROW[-1] <= context]
        depth = next((n for n in depths if fits(n, NARROW[-1])), 0)
        width = next((n for n in brief if fits(depth, n)), width)
        make = partial(_roomy, make_cache, max(depth + NARROW[-1], width))
        several = taken(model, make(), 0, width)
        for i, n in enumerate(NARROW if depth else ()):
            over_empty = taken(model, make(), 0, n)
            behind[i] = taken(model, deep_cache(model, make_cache, depth, n), depth, n)
            behind[i] = max(0, behind[i] - over_empty)
    if tried.fault is not None:
        log.warning("the memory of a pass could not be measured: %s", tried.fault.summary)
    found = [one, max(0, several - one) / max(1, width - 1), *_cached(behind, depth)]
    return None if tried.fault is not None else PassBytes(*found)


def _cached(behind: Sequence[int], depth: int) -> tuple[float, float]:
    """Bytes per pair and per key of passes of `NARROW` tokens, which used so many more over a cache
    of `depth` tokens."""
    if not depth:
        return 0.0, 0.0
    (few, many), (less, more) = NARROW, behind
    pair = max(0, more - less) / (many - few) / depth
    return pair, max(0.0, less / depth - few * pair)


def _roomy(make_cache: MakeCache, tokens: int) -> list[Any]:
    cache = make_cache()
    grow_by(cache, tokens)
    return cache


def taken(model: LoadedModel, cache: list[Any], start: int, width: int) -> int:
    prompt = Prompt(spread(model, start + width))
    mx.reset_peak_memory()
    mx.eval(model.prefill(PrefillChunk(prompt, start, start + width, cache)), arrays(cache))
    return max(0, mx.get_peak_memory() - mx.get_active_memory())


# -- row caches that appear to hold a long prompt


def deep_cache(model: LoadedModel, make_cache: MakeCache, depth: int, more: int) -> list[Any]:
    """A row cache that appears to hold `depth` tokens, with capacity for `more` tokens. Only its
    first token is computed."""
    cache = make_cache()
    grow_by(cache, depth + more)
    model.prefill(PrefillChunk(Prompt(spread(model, 1)), 0, 1, cache))
    for layer in leaves(cache):
        if _quantised(layer):
            _repeat_quantised(layer, depth)
        elif all(isinstance(getattr(layer, name, None), mx.array) for name in ("keys", "values")):
            layer.update_and_fetch(*(_longer(each, depth - 1) for each in _first_token(layer)))
    mx.eval(arrays(cache))
    return cache


def spread(model: LoadedModel, count: int) -> Sequence[int]:
    """Ids spread over the vocabulary, so that a pass reads experts and embeddings as for a real
    prompt."""
    return [(7919 * (i + 1)) % max(2, model.info.vocab_size) for i in range(count)]


def copied_bytes(cache: Sequence[Any]) -> int:
    """Bytes per token of the copy that attention makes of a quantised layer, see
    `upstream.attention`. 0 if no layer of `cache`, which holds a token, is quantised."""
    return max(map(_copied, filter(_quantised, leaves(cache))), default=0)


def _copied(layer: Any) -> int:
    found = 0
    for packed, scales, _ in (layer.keys, layer.values):
        values = packed.shape[-1] * 8 * packed.itemsize // layer.bits
        found += packed.shape[1] * values * scales.itemsize
    return found


def _quantised(layer: Any) -> bool:
    return isinstance(getattr(layer, "keys", None), (tuple, list)) and hasattr(layer, "bits")


def _repeat_quantised(layer: Any, depth: int) -> None:
    """Write the first token to the places of all others, in the buffers of the layer."""
    for stored in (layer.keys, layer.values):
        for each in stored:
            each[:, :, 1:depth] = _longer(mx.contiguous(each[:, :, :1]), depth - 1)
    layer.offset = depth


def _first_token(layer: Any) -> list[mx.array]:
    """Copies of its keys and values, so that the buffers of the layer are filled in place."""
    found = [mx.contiguous(each[:, :, :1]) for each in (layer.keys, layer.values)]
    mx.eval(found)
    return found


def _longer(array: mx.array, tokens: int) -> mx.array:
    """(1, heads, 1, D) repeated to (1, heads, tokens, D), without a copy."""
    return mx.broadcast_to(array, (1, array.shape[1], tokens, array.shape[3]))
