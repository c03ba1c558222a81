"""Disables a feature that keeps failing, and tries it again after growing waits.

A mixed chunk: tokens of a prompt that share the forward pass of rows that decode.

The cost of a pass over few tokens is mostly the cost of reading the weights, which the rows that
decode pay already. To the model, each token of the chunk is a row. Only attention and recurrent
layers treat the tokens as one row, because their keys and states belong to one cache.

Passes of a row with drafts, until it is known how many of their tokens stay in its cache.

Decides whether a chunk runs in its own pass or in the pass of the rows that decode.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...upstream.batch_caches import RowCache, columns
from ...upstream.cache_classes import (
    ArraysCache,
    BatchKVCache,
    KVCache,
    RotatingKVCache,
    append_behind,
    take_back,
    visible_behind,
)
from ...upstream.recurrent import Prefixes
from ..memory import leaves
from ..request import PrefillJob
from ..scheduling.plan import Chunk

TOLERATED = 1
"""Failures after which the feature is still used."""
FIRST_WAIT = 256
"""Steps without failure after which the feature is tried again, or its failures are forgotten."""
LONGEST_WAIT = 2**16
"""About twenty minutes at fifty steps per second."""


class CircuitBreaker:
    """Counts steps and failures of a feature that has a fallback."""

    def __init__(self) -> None:
        self.closed = True
        """The feature is in use."""
        self.failures = 0
        self._quiet = 0
        self._wait = FIRST_WAIT

    def failed(self) -> bool:
        """Count a failure of the feature or of its fallback. Returns whether this failure disables
        it."""
        self._quiet = 0
        if not self.closed:
            return False
        self.failures += 1
        self.closed = self.failures <= TOLERATED
        return not self.closed

    def passed(self, *, used: bool) -> bool:
        """Count a step without failure. Returns whether the feature is enabled again.

        `used`: the step used the feature. The first failure of a trial ends it and doubles the next
        wait, unless as many steps succeeded before.
        """
        if self.closed and not used:
            return False
        self._quiet += 1
        if self._quiet < self._wait:
            return False
        self._quiet = 0
        if self.closed:
            self.failures, self._wait = 0, FIRST_WAIT
            return False
        self.closed, self.failures = True, TOLERATED
        self._wait = min(2 * self._wait, LONGEST_WAIT)
        return True


@dataclass(frozen=True)
class MixedChunk:
    """Text tokens of one prompt, to append to its row cache."""

    tokens: Sequence[int]
    positions: Sequence[int]
    """Rotary position of each token."""
    cache: list[Any]
    ends_prompt: bool = True
    """Whether logits are wanted after its last token."""
    sparse: bool = False
    """Whether tokens between them were left out. The cache is then one of `sparse`."""

    @property
    def turned(self) -> Turned:
        """The chunk as a part of a pass."""
        places = self.positions if self.sparse else None
        return Turned(self.cache, len(self.tokens), positions=places)


@dataclass
class Turned:
    """Several tokens of one row, each in the place of a row."""

    cache: list[Any]
    """The cache of the row."""
    tokens: int
    drafts: bool = False
    """Whether the last tokens may be rejected, see `keep`."""
    states: list[Prefixes] = field(default_factory=list)
    """Prefix states of recurrent layers. The pass fills them."""
    positions: Sequence[int] | None = None
    """Positions of the tokens, if they are not consecutive."""
    stale: mx.array | None = None
    """How many of the last tokens in the cache do not hold, (1,) int32, while that is not read."""
    places: mx.array | None = None
    """(tokens,) int32, if there may be stale tokens before."""

    def keep(self, tokens: int) -> None:
        """Keep the first `tokens` tokens of a pass in the cache, at least one."""
        for layer in leaves(self.cache):
            if hasattr(layer, "update_and_fetch"):
                take_back(layer, self.tokens - tokens)
        for each in self.states:
            each.keep(tokens)
        self.states = []

    def keep_unread(self, held: mx.array) -> None:
        """Let the next pass follow the first `held` + 1 tokens, held: (1,) int32. `keep` may
        follow. Attention caches keep all of them meanwhile."""
        for each in self.states:
            each.keep_unread(held)

    def take_back(self, tokens: int) -> None:
        """Shorten the attention caches: as many tokens before those of the pass did not hold, or
        these do not."""
        for layer in leaves(self.cache):
            if hasattr(layer, "update_and_fetch"):
                take_back(layer, tokens)
        self.stale = None

    def follow(self, stale: mx.array) -> None:
        """So many of the last tokens in the cache do not hold, (1,) int32."""
        layers = (each for each in leaves(self.cache) if hasattr(each, "update_and_fetch"))
        first = next(layers).offset
        self.stale = stale
        self.places = mx.arange(first, first + self.tokens, dtype=mx.int32) - stale


def may_be_stale(cache: RowCache) -> bool:
    """Whether a pass may follow tokens in a row's cache, or in that of its group, of which an
    unread number does not hold."""
    layers = list(leaves(cache))
    attention = [each for each in layers if hasattr(each, "update_and_fetch")]
    counts = {_count_of(each) for each in attention}
    alike = len(counts) == 1 and None not in counts
    others = [each for each in layers if not hasattr(each, "update_and_fetch")]
    return alike and all(isinstance(each, ArraysCache) for each in others)


def _count_of(layer: Any) -> int | None:
    """Tokens of an attention cache. `None`: its tokens cannot be stale."""
    if type(layer) is BatchKVCache:
        return columns(layer)
    if type(layer) is KVCache or (type(layer) is RotatingKVCache and not layer.keep):
        return int(layer.offset)
    return None


class ChunkKV:
    """Attention cache of one row and layer, which the model sees as one cache per token."""

    def __init__(self, inner: Any, row: Turned) -> None:
        self.inner = inner
        self.tokens = row.tokens
        self._positions = row.positions
        self._stale, self._places = row.stale, row.places

    @property
    def offset(self) -> Sequence[int] | mx.array:
        """Rotary offset of every token, until they are appended."""
        if self._positions is not None:
            return self._positions
        if self._places is not None:
            return self._places
        return range(self.inner.offset, self.inner.offset + self.tokens)

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        """The causal mask of the tokens as one chunk. `N`: the one token that each row has."""
        if self._places is not None:
            return visible_behind(self.inner, self._places, kwargs.get("window_size"))
        if self._positions is not None:
            return self.inner.mask_at(self._positions, *args, **kwargs)
        return self.inner.make_mask(self.tokens, *args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append (tokens, heads, 1, D) as (1, heads, tokens, D)."""
        own = keys.swapaxes(0, 2), values.swapaxes(0, 2)
        if self._stale is not None:
            self._places = None
            return append_behind(self.inner, *own, self._stale)
        fetched: tuple[Any, Any] = (
            self.inner.update_and_fetch(*own)
            if self._positions is None
            else self.inner.append_at(*own, self._positions)
        )
        return fetched


def can_share_a_pass(cache: Sequence[Any]) -> bool:
    """Whether every layer of a row cache is attention with a token count, or recurrent."""
    return all(
        isinstance(layer.offset, int)
        if hasattr(layer, "update_and_fetch")
        else isinstance(layer, ArraysCache)
        for layer in leaves(cache)
    )


@dataclass
class Unsettled:
    """The last pass of a row, and the pass before if the last one has followed its unread result.

    Results come in the order of the passes: `keep`, `follow`, `keep`, `settle`. `take_back` ends it
    before `follow`.
    """

    last: Turned
    before: Turned | None = None
    _kept: int | None = None
    """How many tokens stay of the oldest pass here."""

    @property
    def known(self) -> bool:
        """Whether the result of every pass here was told."""
        return self.before is None and self._kept is not None

    def keep(self, tokens: int) -> None:
        """The first `tokens` of the oldest pass stay, at least one. The last call counts."""
        self._kept = tokens

    def follow(self) -> None:
        """Shorten the cache by the drafts of the pass before that did not hold.

        Raises `RuntimeError` if no pass has followed another, or `keep` was not called.
        """
        if self.before is None or self._kept is None:
            raise RuntimeError("no result that a pass has followed was kept")
        self.last.take_back(self.before.tokens - self._kept)
        self.before, self._kept = None, 1 if self.last.tokens == 1 else None  # it had no drafts

    def take_back(self) -> None:
        """Remove the last pass, which has followed an unread result, and what did not hold before
        it."""
        if self.before is not None:
            self.last.take_back(self.last.tokens)
            self.before.keep(self._kept or 1)

    def settle(self) -> None:
        """Remove the drafts that did not hold. Raises `RuntimeError` unless it is `known`."""
        if self.before is not None or self._kept is None:
            raise RuntimeError("it is not known how many tokens of the pass stay")
        self.last.keep(self._kept)


log = logging.getLogger(__name__)


class MixedBatches:
    """Belongs to the engine thread."""

    def __init__(self, possible: bool) -> None:
        """`possible`: result of the probe."""
        self._possible = possible
        self._breaker = CircuitBreaker()
        self._recent: list[PrefillJob | None] = []
        """Jobs with chunks in the last pass and in this one. An error of either may show now."""
        self._apart: list[tuple[int, PrefillJob]] = []
        """Jobs with chunks that ran behind a pass of the rows without waiting, with the number of
        that pass."""
        self._passes = 0

    @property
    def allowed(self) -> bool:
        """Whether the next pass may include a chunk."""
        return self._possible and self._breaker.closed

    def take_along(self, chunk: Chunk | None) -> MixedChunk | None:
        """The part of the next pass that is not rows."""
        self._recent = [*self._recent[-1:], None if chunk is None else chunk.job]
        self._passes += 1
        self._apart = [(at, job) for at, job in self._apart if at >= self._passes - 2]
        if chunk is None:
            return None
        return mixed_chunk(chunk)

    def ran_apart(self, job: PrefillJob) -> None:
        """A chunk runs in its own pass, behind the last pass of the rows."""
        self._apart.append((self._passes, job))

    def blame(self) -> bool:
        """Restart the prompts in a failed pass. Returns whether any prompt was in it."""
        jobs = [job for job in self._recent if job is not None]
        for job in [*jobs, *(job for _, job in self._apart)]:
            job.restart()
        self._recent, self._apart = [], []
        if jobs and self._breaker.failed():
            log.error(
                "mixed passes failed %d times: chunks run in passes of their own now",
                self._breaker.failures,
            )
        return bool(jobs)

    def passed(self) -> None:
        """The last pass did not fail."""
        used = any(job is not None for job in self._recent[-1:])
        if self._breaker.passed(used=used):
            log.info("chunks share the passes of rows that decode again")


def mixed_chunk(chunk: Chunk) -> MixedChunk:
    """The chunk in the form that a pass over rows accepts."""
    job = chunk.job
    return MixedChunk(
        job.tokens[chunk.start : chunk.stop],
        _positions(job, chunk.start, chunk.stop),
        job.held(),
        ends_prompt=chunk.stop == len(job.tokens),
        sparse=job.places is not None,
    )


def _positions(job: PrefillJob, start: int, stop: int) -> Sequence[int]:
    if job.places is not None:
        return job.places[start:stop]
    rotary = job.prompt.positions
    if rotary is None:
        return range(start, stop)
    found: list[int] = rotary[0, start:stop].tolist()
    return found
