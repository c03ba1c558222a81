"""At load time: what a forward pass takes while it runs, beyond what rows and weights keep."""

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
from ..heterogeneous import Heterogeneous
from ..memory import arrays
from ..row_cache import grow_by
from ..scheduling.costs import Curve
from ..scheduling.plan import widths, worthwhile
from .calibration import deep_cache, spread

log = logging.getLogger(__name__)

WIDTHS = (256, 64, 16)
"""Tokens of the wide pass that is measured: the most that it may have within `BRIEF`."""
BRIEF = 0.6
"""Seconds of that pass: a slow machine should not load for long."""
NARROW = 16
"""Tokens of the deep pass that is measured. Fewer may run in kernels that keep no scores (mlx 0.32,
backend/metal/scaled_dot_product_attention.cpp: `sdpa_vector` takes up to 8)."""

DEPTH = 2048
"""Tokens of the cache below it."""

MakeCache = Callable[[], list[Any]]


@dataclass(frozen=True)
class PassBytes:
    """Bytes of passes, as measured."""

    row: float = 0.0
    """For each row that decodes."""
    token: float = 0.0
    """For each further token."""
    pair: float = 0.0
    """For each pair of a new token and a cached one; 0 where attention never holds its scores."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of passes over rows or a chunk, by what was measured and how large a chunk may get."""

    each: PassBytes
    widest: int
    """Tokens of a chunk at most."""
    deepest: Sequence[tuple[int, float]] = field(default=(), repr=False)
    """(tokens of a chunk, cached tokens behind which it may run): a deep one is narrow, as it
    keeps to its time."""
    least: int = 0
    """Tokens that a chunk may have however long they take."""

    @classmethod
    def of(cls, each: PassBytes, curve: Curve, seconds: float, most: int) -> PassMemory:
        """Of chunks that may have so many seconds, and tokens at most."""
        sizes = widths(0, most)
        least = worthwhile(sizes, curve.seconds)
        if curve.depths:  # deep in a prompt attention is most of a pass
            least = max(least, worthwhile(sizes, lambda n: curve.per_key(n) or inf))
        longest = max(seconds, curve.seconds(least))
        widest = bisect_right(range(1, most + 1), longest, key=curve.seconds)
        deepest = [(n, _depth(curve, n, longest)) for n in (*sizes, widest) if n <= widest]
        return cls(each, widest, deepest, least)

    def __call__(self, tokens: int, rows: int) -> int:
        """Bytes of the largest pass of so many rows, or over a prompt of so many tokens."""
        chunk = min(self.widest, tokens)
        pairs = max((min(n, chunk) * min(d, tokens) for n, d in self.deepest), default=0.0)
        pairs = max(pairs, min(self.least, chunk) * tokens)
        each = self.each
        return int(each.row * rows + each.token * max(chunk, rows) + each.pair * pairs)


def _depth(curve: Curve, tokens: int, longest: float) -> float:
    """Cached tokens behind which a chunk of so many takes no longer."""
    slope, left = curve.per_key(tokens), longest - curve.seconds(tokens)
    return left / slope if slope > 0 else inf


def measure(
    model: LoadedModel,
    make_cache: MakeCache,
    curve: Curve,
    heterogeneous: Heterogeneous | None = None,
) -> PassBytes | None:
    """Watch the peaks of passes of `model` on the engine thread. `None`: they failed.

    `heterogeneous`: other processes keep different parts of a row, and the largest passes count.
    """
    context = model.info.context_length
    fitting = [n for n in WIDTHS if curve.seconds(n) <= BRIEF and n <= context]
    width = fitting[0] if fitting else min(WIDTHS[-1], context)
    make = partial(_roomy, make_cache, DEPTH + NARROW)
    one = several = behind = narrow = 0
    with Isolation() as tried:
        one = _taken(model, make(), 0, 1)
        several = _taken(model, make(), 0, width)
        narrow = _taken(model, make(), 0, min(NARROW, context))
        if context >= DEPTH + NARROW:
            behind = _taken(model, deep_cache(model, make_cache, DEPTH, NARROW), DEPTH, NARROW)
    if tried.fault is not None:
        log.warning("what a pass takes could not be measured: %s", tried.fault.summary)
    token = max(0, several - one) / max(1, width - 1)
    pair = max(0, behind - narrow) / (NARROW * DEPTH)
    row: float = one
    if heterogeneous is not None:
        row, token, pair = heterogeneous.most([row, token, pair])
    return None if tried.fault is not None else PassBytes(row, token, pair)


def _roomy(make_cache: MakeCache, tokens: int) -> list[Any]:
    cache = make_cache()
    grow_by(cache, tokens)
    return cache


def _taken(model: LoadedModel, cache: list[Any], start: int, width: int) -> int:
    """Bytes that a pass over `width` tokens held at its peak and gave back."""
    prompt = Prompt(spread(model, start + width))
    mx.reset_peak_memory()
    mx.eval(model.prefill(PrefillChunk(prompt, start, start + width, cache)), arrays(cache))
    return max(0, mx.get_peak_memory() - mx.get_active_memory())
