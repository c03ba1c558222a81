"""How many bytes rows need, how many there are, and whether a prompt fits. Imports no mlx.

A row first has capacity for the prompt and an output reserve, which most replies do not exceed, and
then grows in steps. A growing buffer is copied, and MLX's pool reuses the freed one only for nearly
the same size (mlx 0.32, backend/metal/allocator.cpp)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..request import PrefillJob, Request, Row

if TYPE_CHECKING:
    from ..prefix_cache.buffers import Lease, RowBuffers

STEP_TOKENS = 256
"""Every capacity is a multiple of this (mlx_lm/models/cache.py 0.32.2, `KVCache.step`)."""
LEAST_GROWTH_TOKENS = 1024
"""Least growth of a row beyond its reserve, if its reply may become so long."""
GROWTH_SHARE = 8
"""A long row grows by this fraction (1/n) of its first capacity."""

Offers = Mapping[Row, "Lease | None"]
"""What rows of a queued prompt would use of the prefix cache in place. `None`: nothing."""
NO_OFFERS: Offers = MappingProxyType({})


def whole_steps(tokens: int) -> int:
    """The tokens, rounded up to a multiple of `STEP_TOKENS`."""
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def kv_growth(first: int, longest: int) -> int:
    """Tokens by which a row grows beyond its capacity `first`, if it has `longest` at most."""
    wanted = max(LEAST_GROWTH_TOKENS, first // GROWTH_SHARE)
    left = longest - whole_steps(first)  # the first capacity is allocated in whole steps
    return whole_steps(max(1, min(wanted, left)))


def kv_capacity(first: int, longest: int, needed: int, leased: int = 0) -> int:
    """Capacity in tokens for `needed` ones. `leased`: of the buffers with which the row began. With
    300 as `first`, and a growth of 1,024, it is 300, 512, 1,536, ...; with 768 `leased`, it is 768,
    1,792, ..."""
    if needed <= first and leased < first:
        return first
    growth, begun = kv_growth(first, longest), leased if leased >= first else whole_steps(first)
    return begun + -(-max(0, needed - begun) // growth) * growth


@dataclass(frozen=True)
class MemoryProfile:
    """Cache bytes of one row: fixed state, plus bytes per token up to each window."""

    state_bytes: int
    token_bytes: int  # bytes per token of the layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()
    """(window in tokens, bytes per token) of the layers that keep only a window of tokens."""

    @property
    def recurrent(self) -> bool:
        """Whether a layer has a state that every token changes."""
        return self.state_bytes > 0

    def row_bytes(self, tokens: int) -> int:
        grown = whole_steps(tokens)
        windowed = sum(min(grown, window) * nbytes for window, nbytes in self.windows)
        return self.state_bytes + grown * self.token_bytes + windowed


@dataclass(frozen=True)
class Limits:
    """The limits of one engine."""

    max_rows: int  # at once
    max_queue: int  # requests
    stall_target: float  # seconds that a token of decoding rows may take on average beside a prompt
    max_chunk: int  # tokens
    output_reserve: int  # tokens of a reply for which memory is reserved at admission


class Ledger(ABC):
    """The memory that an engine's rows need and have. Any thread may call it, except that only the
    engine thread may `reclaim`."""

    limits: Limits

    @abstractmethod
    def row_bytes(self, tokens: int) -> int:
        """Cache bytes of one row with this many tokens."""

    @abstractmethod
    def available(self) -> int:
        """Bytes for all live rows: those that weights and the rows of other engines leave."""

    @abstractmethod
    def available_alone(self) -> int:
        """Bytes for live rows if no other model were loaded."""

    def pass_bytes(self, tokens: int, rows: int) -> int:
        """Bytes of the largest pass of this many rows, or over a prompt of this many tokens."""
        return 0

    def image_bytes(self) -> int:
        """Bytes of images that requests hold, besides their rows, until these reach the model."""
        return 0

    def others_go_on(self) -> bool:
        """Whether other engines hold memory that they will free without any action of this one."""
        return False

    def unloadable(self, need: int, pinned: int) -> int:
        """Bytes of idle models that `reclaim` would unload for this many bytes of live rows, if
        `pinned` more bytes of the prefix cache could not be evicted."""
        return 0

    @abstractmethod
    def reclaim(self, need: int) -> None:
        """Unload idle models and evict prefixes, so that live rows may use `need` bytes."""

    def reservation(self, rows: Iterable[Row], offers: Offers = NO_OFFERS) -> int:
        """Bytes to reserve for rows: their caches, an output reserve, and their passes. What they
        use of the prefix cache counts there, once for all rows. `offers`: what rows of a queued
        prompt will use."""
        rows = list(rows)
        if not rows:
            return 0
        nbytes = sum(self._charged_bytes(row, offers.get(row, row.lease)) for row in rows)
        return nbytes + self.pass_bytes(max(map(self._tokens_to_run, rows)), len(rows))

    def may_wait(self, row: Row, active_rows: int) -> bool:
        """Whether a row that has outgrown the memory can continue later."""
        full = self.row_bytes(self._unmerged_capacity(row, row.lease))  # a shared prefix included
        if full + self.pass_bytes(self._tokens_to_run(row), 1) > self.available_alone():
            return False
        return active_rows > 1 or self.others_go_on()

    def capacity_for(self, job: PrefillJob) -> int:
        """Token capacity for the caches of the prompt's rows."""
        return max(self._unmerged_capacity(row, row.lease) for row in job.rows)

    def growth_for(self, job: PrefillJob) -> int:
        """Tokens by which these caches grow when they are full."""
        return kv_growth(*self._sizes(job.request))

    def spare(self, row: Row) -> int:
        """Bytes of the capacity that a row has only for later turns of its conversation."""
        if row.lease is None or row.lease.capacity <= self.kv_needed(row):
            return 0
        reserved = self._bytes(row.lease, self._tokens_reserved(row, row.lease))
        return max(0, reserved - self._bytes(row.lease, self.kv_needed(row)))

    def kv_needed(self, row: Row) -> int:
        """Token capacity of a row without room for later turns."""
        return whole_steps(kv_capacity(*self._sizes(row.request), row.length_to_cache + 1))

    def outgrown(self, row: Row) -> bool:
        """Whether a row needs more memory than its reservation at admission."""
        return len(row.tokens) >= self.limits.output_reserve

    def exceeds(self, row: Row) -> bool:
        """The same as `outgrown`, or because of a longer row in the same cache."""
        return self.outgrown(row) or row.merged_length > self._sizes(row.request)[0]

    def _charged_bytes(self, row: Row, lease: Lease | None) -> int:
        """Bytes that are reserved for a row, without what the prefix cache counts."""
        stored = 0 if lease is None else lease.stored_bytes
        return max(0, self._bytes(lease, self._tokens_reserved(row, lease)) - stored)

    def _bytes(self, lease: Lease | None, tokens: int) -> int:
        """Cache bytes of a row of this capacity, also of what it uses of the prefix cache."""
        whole = self.row_bytes(tokens)
        return whole if lease is None else whole + lease.extra_bytes(tokens)

    def _tokens_to_run(self, row: Row) -> int:
        """Tokens of a row's longest prefill, also of one after a preemption."""
        length = row.length_to_cache
        return length if self.outgrown(row) else min(length, len(row.request.prompt.tokens))

    def _tokens_reserved(self, row: Row, lease: Lease | None) -> int:
        return max(self._unmerged_capacity(row, lease), row.merged_length)

    def _unmerged_capacity(self, row: Row, lease: Lease | None) -> int:
        """Token capacity of a row in a cache of its own."""
        first, longest = self._sizes(row.request)
        leased = 0 if lease is None else lease.capacity
        return kv_capacity(first, longest, row.length_to_cache + 1, leased)

    def _sizes(self, request: Request) -> tuple[int, int]:
        """The first capacity of its rows in tokens, and the largest length."""
        prompt, reply = len(request.prompt.tokens) - request.skipped_tokens, request.max_tokens
        return prompt + min(reply, self.limits.output_reserve), prompt + reply


class PrefixOffers:
    """What prompts get without a prefix cache: nothing. `PrefixCachePolicy` overrides this."""

    def offers(self, job: PrefillJob) -> Sequence[Lease | None]:
        """What each row of a queued prompt will use of the prefix cache in place."""
        return ()

    def fork_bytes(self, tokens: int, rows: int) -> int:
        """Bytes that so many rows of a prompt save because they share its tokens."""
        return 0


@dataclass(frozen=True)
class MemoryCheck:
    """A count of the bytes of all live rows. It lasts until a row exceeds its reservation."""

    need: int = 0
    limit: int | None = None  # bytes that were available to them; `None`: they do not fit

    @property
    def fits(self) -> bool:
        return self.limit is not None


@dataclass(frozen=True)
class Room:
    """Whether and how a prompt fits beside other rows."""

    need: int
    """Bytes of all rows and of images, less what rows give back. If the prompt does not fit, also
    the bytes that it would pin. 0: all places for rows are taken."""
    fits: bool = True
    in_place: bool = False  # whether the prompt leases stored buffers when it is admitted
    trims: bool = False  # whether other rows give back their spare capacity for it


class StepMemory:
    """The bytes of live rows while a step is decided. A prompt fits beside rows if

        reservation(rows, prompt) - spare + images <= available - newly pinned + unloadable

    Spare: what rows give back if the prompt does not fit otherwise. Newly pinned: what the prompt
    uses of the prefix cache in place and no row used before, less what only rows used that end now.
    All else in the prefix cache can be evicted for it, and idle models can be unloaded."""

    def __init__(self, ledger: Ledger, prefixes: PrefixOffers, rows: Iterable[Row]) -> None:
        """`rows`: those that decode, and others that end in this step."""
        self.ledger = ledger
        self.prefixes = prefixes
        self.rows = list(rows)
        self.trims: dict[Row, int] = {}  # rows that give back capacity, and tokens that they keep
        self.offers: dict[PrefillJob, Sequence[Lease | None]] = {}
        """What the rows of queued prompts would use of the prefix cache in place."""

    def _need(self, rows: Sequence[Row], offers: Offers = NO_OFFERS) -> int:
        """Bytes of rows, without the capacity that some of them give back."""
        spare = sum(self.ledger.spare(row) for row in rows if row in self.trims)
        return self.ledger.reservation(rows, offers) - spare

    def check(self, rows: Sequence[Row]) -> MemoryCheck:
        """Count the bytes of these live rows, without any prompt."""
        need = self._need(rows)
        limit = self._limit(need, self.newly_pinned(rows, ()))
        return MemoryCheck(need, limit if need <= limit else None)

    def _limit(self, need: int, pinned: int) -> int:
        """Bytes that live rows can have once memory is reclaimed for `need`."""
        limit = self.ledger.available() - pinned
        return limit if need <= limit else limit + self.ledger.unloadable(need, pinned)

    def newly_pinned(self, rows: Iterable[Row], leases: Iterable[Lease | None]) -> int:
        """Bytes of the prefix cache that can no longer be evicted once `leases` are acquired, less
        those that become evictable when only `rows` of `self.rows` are left. May be negative."""
        leased, staying = buffers_of(leases), set(rows)
        ended = {row.lease for row in self.rows if row not in staying}
        freed = [own for own in buffers_of(ended) - leased if ended.issuperset(own.users)]
        pinned = [own for own in leased if not own.in_use]
        return sum(own.stored for own in pinned) - sum(own.stored for own in freed)

    def trim(self, rows: Iterable[Row]) -> None:
        """Let rows give back the capacity that is only for later turns."""
        self.trims |= {row: self.ledger.kv_needed(row) for row in rows if self.ledger.spare(row)}

    def room(self, job: PrefillJob, rows: Sequence[Row]) -> Room:
        """The room for a prompt beside `rows`. The prompt uses stored buffers in place; if it does
        not fit so, and there are no other rows, it copies them."""
        if len(rows) + len(job.rows) > self.ledger.limits.max_rows:
            return Room(0, fits=False)
        room = self._room(job, rows, in_place=True)
        if room.fits or rows:
            return room
        # behind a prefix, a row may need more than without it, perhaps more than is available
        copied = self._room(job, rows, in_place=False)
        return copied if copied.fits else room

    def _room(self, job: PrefillJob, rows: Sequence[Row], *, in_place: bool) -> Room:
        """`in_place`: the prompt uses stored buffers, which are no part of its need. Else it copies
        them. If the prompt does not fit, they are a part of its need, too: memory is reclaimed for
        the prompt, but not from them."""
        if in_place and job not in self.offers:
            self.offers[job] = self.prefixes.offers(job)
        leases = self.offers[job] if in_place else ()
        need = self._need([*rows, *job.rows], dict(zip(job.rows, leases, strict=False)))
        if not in_place and job.uses_prefix_cache:
            need -= self.prefixes.fork_bytes(len(job.tokens), len(job.rows))
        images = self.ledger.image_bytes()
        pinned = self.newly_pinned(rows, leases)
        limit = self._limit(need + images, pinned)
        # images are temporary, and may be its own, so none block a prompt that would run alone
        if need + (images if rows else 0) <= limit:
            return Room(need + images, in_place=in_place)
        spare = sum(self.ledger.spare(row) for row in rows if row not in self.trims)
        if spare and need - spare + images <= limit:
            return Room(need - spare + images, in_place=in_place, trims=True)
        return Room(need + images + max(0, pinned), fits=False)


def buffers_of(leases: Iterable[Lease | None]) -> set[RowBuffers]:
    """All buffers that the leases use, each once."""
    return {buffers for lease in leases if lease is not None for buffers in lease.buffers}
