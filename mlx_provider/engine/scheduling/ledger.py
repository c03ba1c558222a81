"""Who has how many bytes, and who gives some back: the memory of rows. Imports no mlx.

A row has capacity for the prompt and an output reserve, then for steps that a long reply seldom
needs. A growing buffer is copied, and MLX's pool reuses the freed one only for nearly the same size
(mlx 0.32, backend/metal/allocator.cpp).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..prefix_cache.tree import common
from ..request import PrefillJob, Request, Row

if TYPE_CHECKING:
    from ..prefix_cache.buffers import Lease
    from .scheduler import Scheduler, StepRecord

STEP_TOKENS = 256
"""Every capacity is a multiple of this (mlx_lm/models/cache.py 0.32.2, `KVCache.step`)."""
LEAST_GROWTH_TOKENS = 1024
"""Least growth of a row beyond its reserve, if its reply may become so long."""
GROWTH_SHARE = 8
"""A long row grows by this fraction (1/n) of its first capacity."""

PATIENCE_SECONDS = 30.0
"""After this time, a prompt that does not fit stops later prompts from overtaking it."""
CLAIMS_PER_STEP = 4
"""Most prompts per step that are tried with what they can use of the prefix cache in place."""
WORTH_WAITING = 256
"""A prompt waits for an admitted one that will store at least so many more tokens of its prefix."""

Claims = Mapping[Row, "Lease | None"]
NO_CLAIMS: Claims = MappingProxyType({})


def whole_steps(tokens: int) -> int:
    return -(-tokens // STEP_TOKENS) * STEP_TOKENS


def kv_growth(first: int, longest: int) -> int:
    """Growth of a row with first capacity `first`, which ends at `longest` tokens."""
    wanted = max(LEAST_GROWTH_TOKENS, first // GROWTH_SHARE)
    left = longest - whole_steps(first)  # the first capacity is allocated in whole steps
    return whole_steps(max(1, min(wanted, left)))


def kv_capacity(first: int, longest: int, needed: int, before: int = 0) -> int:
    """`before`: what the row's buffers had when it began."""
    if needed <= first and before < first:
        return first
    step, whole = kv_growth(first, longest), before if before >= first else whole_steps(first)
    return whole + -(-max(0, needed - whole) // step) * step


@dataclass(frozen=True)
class MemoryProfile:
    """Cache bytes of one row: fixed state, plus bytes per token up to each window."""

    state_bytes: int
    token_bytes: int
    """Bytes per token of the layers that keep every token."""
    windows: tuple[tuple[int, int], ...] = ()
    """(window in tokens, bytes per token) of the layers that keep only a window of tokens."""

    @property
    def recurrent(self) -> bool:
        """Whether a layer has a state that every token changes."""
        return self.state_bytes > 0

    def row_bytes(self, tokens: int) -> int:
        grown = whole_steps(tokens)
        windowed = sum(min(grown, window) * each for window, each in self.windows)
        return self.state_bytes + grown * self.token_bytes + windowed


@dataclass(frozen=True)
class Limits:
    max_rows: int
    max_queue: int
    stall_target: float
    """Seconds that a token of decoding rows may take on average beside a prompt."""
    max_chunk: int
    output_reserve: int


class Ledger(ABC):
    """Any thread may call it, except for `reclaim`."""

    limits: Limits

    # -- the memory of the process

    @abstractmethod
    def row_bytes(self, tokens: int) -> int:
        """Cache bytes of one row with this many tokens."""

    @abstractmethod
    def available(self) -> int:
        """Bytes for all live rows: those that weights and the rows of other engines leave."""

    @abstractmethod
    def alone(self) -> int:
        """Bytes for live rows if no other model were loaded."""

    def pass_bytes(self, tokens: int, rows: int) -> int:
        """Bytes of a running pass of this many prompt tokens and rows."""
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
        """Unload idle models and shrink the prefix cache, so that live rows may use this many
        bytes (engine thread)."""

    # -- rows

    def reservation(self, rows: Iterable[Row], claims: Claims = NO_CLAIMS) -> int:
        """Bytes to reserve for rows: their caches, an output reserve, and their passes. What they
        use of the prefix cache is counted there, once for all rows. `claims`: what rows of a queued
        prompt will use."""
        rows = list(rows)
        if not rows:
            return 0
        nbytes = sum(self._own_bytes(row, claims.get(row, row.lease)) for row in rows)
        return nbytes + self.pass_bytes(max(map(self._tokens_to_run, rows)), len(rows))

    def may_wait(self, row: Row, active_rows: int) -> bool:
        """Whether a row that has outgrown the memory can continue later."""
        full = self.row_bytes(self._own_capacity(row))  # a shared prefix included
        if full + self.pass_bytes(self._tokens_to_run(row), 1) > self.alone():
            return False
        return active_rows > 1 or self.others_go_on()

    def kv_capacity(self, job: PrefillJob) -> int:
        """Token capacity for the caches of the prompt's rows."""
        return max(map(self._own_capacity, job.rows))

    def kv_growth(self, job: PrefillJob) -> int:
        return kv_growth(*self._first_capacity(job.request))

    def spare(self, row: Row) -> int:
        """Bytes of the capacity that a row has only for later turns of its conversation."""
        if row.lease is None or row.lease.capacity <= self.kv_needed(row):
            return 0
        reserved = self._bytes(row.lease, self._tokens_reserved(row))
        return max(0, reserved - self._bytes(row.lease, self.kv_needed(row)))

    def kv_needed(self, row: Row) -> int:
        """Token capacity of a row without room for later turns."""
        return whole_steps(kv_capacity(*self._first_capacity(row.request), row.cached_length + 1))

    def outgrown(self, row: Row) -> bool:
        """Whether a row needs more memory than its reservation at admission."""
        return len(row.tokens) >= self.limits.output_reserve

    def exceeds(self, row: Row) -> bool:
        """The same as `outgrown`, or because of a longer row in the same cache."""
        longer = row.merged and row.merged > self._first_capacity(row.request)[0]
        return self.outgrown(row) or bool(longer)

    def _own_bytes(self, row: Row, lease: Lease | None) -> int:
        stored = 0 if lease is None else lease.stored
        return max(0, self._bytes(lease, self._tokens_reserved(row)) - stored)

    def _bytes(self, lease: Lease | None, tokens: int) -> int:
        """Cache bytes of a row of this capacity, also of what it uses of the prefix cache."""
        whole = self.row_bytes(tokens)
        return whole if lease is None else whole + lease.extra_bytes(tokens)

    def _tokens_to_run(self, row: Row) -> int:
        """Tokens of a row that are prefilled, or may have to be prefilled again."""
        length = row.cached_length
        return length if self.outgrown(row) else min(length, len(row.request.prompt.tokens))

    def _tokens_reserved(self, row: Row) -> int:
        return max(self._own_capacity(row), row.merged)

    def _own_capacity(self, row: Row) -> int:
        """Token capacity of a row in a cache of its own."""
        first, longest = self._first_capacity(row.request)
        before = 0 if row.lease is None else row.lease.capacity
        return kv_capacity(first, longest, row.cached_length + 1, before)

    def _first_capacity(self, request: Request) -> tuple[int, int]:
        """The first capacity of its rows in tokens, and their largest length."""
        prompt, most = len(request.prompt.tokens) - request.skipped, request.max_tokens
        return prompt + min(most, self.limits.output_reserve), prompt + most


class StepBuilder:
    """A step while it is decided: the rows and prompts that stay, and what happens to others."""

    def __init__(self, scheduler: Scheduler, record: StepRecord) -> None:
        self.scheduler = scheduler
        self.ledger = scheduler.ledger
        self.record = record
        late = record.expired
        self.rows = [row for row in scheduler.running if row.request not in late]
        left = [job for job in scheduler.waiting if job.request not in late]
        self.jobs = scheduler.in_order(record.now, left)
        self._released = sum(row.stored for request in late for row in request.rows)
        """Bytes of the prefix cache that rows no longer use."""
        self._claims: dict[PrefillJob, Sequence[Lease | None]] = {}
        """Leases of queued prompts, not acquired. They are not in the record, where they would keep
        memory."""

    @property
    def live(self) -> list[Row]:
        return [*prefilling(self.jobs), *self.rows]

    def fit_rows(self) -> None:
        """If rows have outgrown the memory, they give back spare capacity, or else the youngest
        waits, or ends if it could never continue."""
        before, limit = self.scheduler.fitting_limit, self.ledger.available()
        if limit == before and not any(map(self.ledger.exceeds, self.rows)):
            return
        need = self._need(self.live)
        grown = need > self.scheduler.reclaimed_bytes
        if need > self._limit(need):
            self._trim(self.live)
            need = self._need(self.live)
        while need > self._limit(need) and self.rows:
            active = len(self.live)
            row = max(self.rows, key=lambda row: (row.request.arrived, row.index))
            waits = self.ledger.may_wait(row, active)
            self._remove(row, self.record.preempted if waits else self.record.cut)
            need = self._need(self.live)
        self.record.need, self.record.limit = need, self._limit(need)
        self.record.reclaim = need if grown else 0

    def displace(self) -> PrefillJob | None:
        """Preempt rows so that the first prompt of an account without rows can be admitted. Returns
        the prompt. `None`: every account has rows, the prompt fits anyway, or preempting would
        not free enough."""
        if not self.scheduler.shares.several or not self.live:
            return None
        present = {row.request.account for row in self.live}
        absent = (job for job in self.jobs if job.request.account not in present)
        job = next((job for job in absent if not job.restoring and not self.awaits(job)), None)
        if job is None or self._room(job) is not None:
            return None
        rows: list[Row] = []
        for row in above_share(self.rows):
            rows.append(row)
            if self._room(job, rows) is not None:
                for victim in rows:
                    self._remove(victim, self.record.preempted)
                return job
        return None

    def choose_prompt(self, first: PrefillJob | None) -> PrefillJob | None:
        """The most urgent prompt that fits, unless a prompt in prefill goes first. `first`: the one
        for which rows give way."""
        tried = 0
        for job in (*filter(None, (first,)), *self.jobs):
            if job.restoring:
                continue
            if job.admitted:
                return None
            if self.awaits(job):
                continue
            claims = tried < CLAIMS_PER_STEP
            tried += 1
            # `Scheduler.fits_ahead` has found room for a background prefill
            if job.request.ahead or self._admit(job, claims=claims):
                return job
            if self.record.now - job.arrived > PATIENCE_SECONDS:
                # no new prompt overtakes it, but admitted prompts must continue, or it never fits
                return None
        return None

    def awaits(self, job: PrefillJob) -> bool:
        """Whether a prompt should wait, because a started one will store its prefix soon."""
        return any(provides(leader, job) for leader in self.jobs if leader.admitted)

    def _admit(self, job: PrefillJob, *, claims: bool) -> bool:
        """Whether a prompt fits beside the live rows."""
        room = self._room(job, claims=claims)
        if room is None:
            return False
        self.record.reclaim, self.record.leases = room.need, room.claims
        if room.trims:
            self._trim(self.live)
        return True

    def _remove(self, row: Row, into: list[Row]) -> None:
        into.append(row)
        self.rows.remove(row)
        self._released += row.stored

    def _need(self, rows: Sequence[Row], claims: Claims = NO_CLAIMS) -> int:
        spare = sum(self.ledger.spare(row) for row in rows if row in self.record.trims)
        return self.ledger.reservation(rows, claims) - spare

    def _claims_of(self, job: PrefillJob) -> Sequence[Lease | None]:
        if job not in self._claims:
            self._claims[job] = self.scheduler.offers(job)
            self.record.tried = [*self._claims]
        return self._claims[job]

    def _limit(self, need: int, pinned: int = 0) -> int:
        """Bytes for live rows once memory is reclaimed for `need`, if rows also use `pinned` bytes
        of the prefix cache that can now be evicted."""
        limit = self.ledger.available() + self._released - pinned
        return limit if need <= limit else limit + self.ledger.unloadable(need, pinned)

    def _trim(self, rows: Sequence[Row]) -> None:
        """Free the capacity of rows that is only for later turns."""
        spare = [row for row in rows if self.ledger.spare(row)]
        self.record.trims |= {row: self.ledger.kv_needed(row) for row in spare}

    def _room(
        self, job: PrefillJob, without: Sequence[Row] = (), *, claims: bool = True
    ) -> Room | None:
        """The room for a prompt beside the live rows, except those in `without`. `None`: it does
        not fit. `claims`: the prompt uses stored buffers in place, which stay and are not part of
        its need. Images are temporary, and may be the prompt's own, so they do not block a prompt
        that would run alone."""
        rows = [row for row in self.live if row not in without]
        if len(rows) + len(job.rows) > self.ledger.limits.max_rows:
            return None
        leases = self._claims_of(job) if claims else ()
        claimed = dict(zip(job.rows, leases, strict=False))
        pinned = sum(lease.pinned_bytes for lease in leases if lease is not None)
        need, images = self._need([*rows, *job.rows], claimed), self.ledger.image_bytes()
        if not claims and rows and job.uses_prefix_cache:
            # `STEP_TOKENS` more for it behind a prefix, and for the row that has the prefix now
            need += self.ledger.row_bytes(2 * STEP_TOKENS)
        limit = self._limit(need + images, pinned)
        spare = sum(self.ledger.spare(row) for row in rows if row not in self.record.trims)
        if need + (images if rows else 0) <= limit:
            return Room(need + images, claims, trims=False)
        if spare and need - spare + images <= limit:
            return Room(need - spare + images, claims, trims=True)
        self.record.reclaim = self.record.reclaim or need + images
        # behind a prefix, a row may need more than without it, perhaps more than is available
        return self._room(job, claims=False) if claims and not rows else None


def above_share(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that give way to an account without rows, one after the other: the youngest of the
    account with the most rows. Each account keeps one."""
    remaining = sorted(rows, key=lambda row: (row.request.arrived, row.index))
    counts = Counter(row.request.account for row in remaining)
    while counts:
        account, count = counts.most_common(1)[0]
        if count < 2:
            return
        at = max(at for at, row in enumerate(remaining) if row.request.account == account)
        counts[account] -= 1
        yield remaining.pop(at)


@dataclass(frozen=True)
class Room:
    need: int
    """Bytes of all rows."""
    claims: bool
    trims: bool
    """Whether other rows give back their spare capacity for it."""


def prefilling(jobs: Iterable[PrefillJob]) -> list[Row]:
    return [row for job in jobs if job.admitted and not job.request.ahead for row in job.rows]


def provides(leader: PrefillJob, job: PrefillJob) -> bool:
    """Whether `leader` will soon provide much of `job`'s prompt."""
    if leader is job or not leader.uses_prefix_cache or leader.request.salt != job.request.salt:
        return False
    if leader.ids is None or job.ids is None:
        return False
    shared = min(common(leader.ids, job.ids), len(leader.tokens), len(job.tokens) - 1)
    return shared - job.estimated_cached > WORTH_WAITING
