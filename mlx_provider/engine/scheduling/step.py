"""What one step does, and which rows and prompts take part. Imports no mlx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..prefix_cache.tree import common
from ..request import PrefillJob, Request, Row
from .ledger import NO_OFFERS, Offers

if TYPE_CHECKING:
    from ..prefix_cache.buffers import Lease, RowBuffers
    from .scheduler import Scheduler

PATIENCE_SECONDS = 30.0
"""After this time, a prompt that does not fit stops later prompts from overtaking it."""
TRIED_PER_STEP = 8
"""Most prompts per step that are tried: each counts the bytes of all rows."""
WORTH_WAITING = 256
"""A prompt waits for an admitted one that will store at least so many more tokens of its prefix."""


@dataclass(frozen=True)
class Chunk:
    """Prefill tokens `start .. stop` of `job`."""

    job: PrefillJob
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def due(self) -> bool:
        """Whether its prompt is still at `start`: it has neither ended nor started again."""
        return self.job.cache is not None and self.job.computed_tokens == self.start


@dataclass(frozen=True)
class StepPlan:
    rows: tuple[Row, ...] = ()
    """All rows of the batch, which decode, or none: all wait for a brief prompt."""
    chunk: Chunk | None = None
    mixed: bool = False
    """Whether the chunk is in the pass of the rows, not in its own pass."""
    pass_seconds: float = 0.0
    """Expected seconds of the rows' pass, including a mixed chunk."""
    passes: int = 1
    """Passes in which the rows decode: several if they do not share one."""
    chunk_seconds: float = 0.0
    """Expected seconds of the chunk's own pass."""
    prepared: PrefillJob | None = None
    """The prompt that is scored, or whose media run through the vision tower, behind the rows'
    pass, before its next chunk."""
    preparing_seconds: float = 0.0
    """Time limit for that in this step. At least one piece, or image, runs."""


@dataclass(frozen=True)
class MemoryCheck:
    """The last count of the bytes of live rows."""

    need: int = 0
    limit: int | None = None
    """Bytes that were available, if they fit. They fit until a row exceeds its reservation."""

    def settles(self, available: int) -> bool:
        """Whether the rows still fit, unless one has exceeded its reservation since."""
        return self.limit == available


@dataclass
class StepRecord:
    """A step, or its part until prompts begin: what `Engine.run` does first, in this order, and the
    plan (`Scheduler.apply`: for the queue). If only what `empty` leaves out is set, steps pause."""

    now: float
    """When the step began, in monotonic seconds."""
    to_expire: Sequence[Request] = ()
    """Requests whose time limit has passed."""
    to_end: list[Row] = field(default_factory=list)
    """Rows that end because memory is full."""
    to_trim: dict[Row, int] = field(default_factory=dict)
    """Rows that give back spare capacity, and the tokens that they keep room for. They may also be
    ended or preempted, which is decided later."""
    admit_in_place: bool = False
    """Whether the prompt to admit leases the stored buffers that it will use in place, before rows
    are stored and memory is reclaimed. Prefixes that it will copy are not protected."""
    to_preempt: list[Row] = field(default_factory=list)
    """Rows that free their memory and wait."""
    to_reclaim: int = 0
    """Bytes of rows for which prefixes and idle models make room, also for the first prompt that
    waits. The need of a prompt to admit replaces that."""
    to_admit: PrefillJob | None = None
    to_look_up: Sequence[PrefillJob] = ()
    """Prompts that asked what they can use in place."""
    to_begin: Sequence[PrefillJob] = ()
    """Prompts that get a cache, or start a restore from disk. The record then has no plan."""
    plan: StepPlan = field(default_factory=StepPlan)
    memory_check: MemoryCheck | None = None
    """`None`: nothing was counted, as no row has outgrown the last count."""

    @property
    def empty(self) -> bool:
        """Whether nothing runs, begins or ends."""
        orders = (self.to_expire, self.to_end, self.to_preempt, self.to_admit, self.to_begin)
        return not any((*orders, self.plan.rows, self.plan.chunk, self.plan.prepared))


class StepBuilder:
    """A step while it is decided: the rows and prompts that stay, and what happens to others. A
    prompt fits if the need of all rows, less what they give back, is at most what is available,
    less what it pins in the prefix cache, plus the idle models that could be unloaded."""

    def __init__(self, scheduler: Scheduler, record: StepRecord) -> None:
        self.scheduler = scheduler
        self.ledger = scheduler.ledger
        self.record = record
        late = record.to_expire
        self.rows = [row for row in scheduler.running if row.request not in late]
        left = [job for job in scheduler.waiting if job.request not in late]
        self.jobs = scheduler.in_order(record.now, left)
        self._leaving = [row for request in late for row in request.rows]
        """Rows that end or wait."""
        self.offers: dict[PrefillJob, Sequence[Lease | None]] = {}
        """What the rows of queued prompts would use of the prefix cache in place. It is not in the
        record, where it would keep memory."""

    @property
    def live(self) -> list[Row]:
        """Rows that are charged. A background prefill is not: it starts only in unused memory."""
        return [*prefilling(self.jobs), *self.rows]

    def fit_rows(self) -> None:
        """If rows have outgrown the memory, or the limit has moved, they give back spare capacity,
        or else the youngest waits, or ends if it could never continue."""
        last, ledger = self.scheduler.memory_check, self.ledger
        if last.settles(ledger.available()) and not any(map(ledger.exceeds, self.rows)):
            return
        need = self._need(self.live)
        has_grown = need > last.need
        if need > self._limit(need):
            self._trim(self.live)
            need = self._need(self.live)
        while need > self._limit(need) and self.rows:
            row = max(self.rows, key=lambda row: (row.request.arrived, row.index))
            can_return = ledger.may_wait(row, len(self.live))
            self._remove(row, self.record.to_preempt if can_return else self.record.to_end)
            need = self._need(self.live)
        limit = self._limit(need)
        self.record.memory_check = MemoryCheck(need, limit if need <= limit else None)
        self.record.to_reclaim = need if has_grown else 0

    def displace(self) -> PrefillJob | None:
        """Preempt rows so that the first prompt of a tenant without rows can be admitted. Returns
        the prompt. `None`: every tenant has rows, the prompt fits anyway, or preempting would
        not free enough: then memory is reclaimed for it while it waits."""
        if not self.scheduler.shares.several or not self.live:
            return None
        present = {row.request.tenant for row in self.live}
        absent = (job for job in self.jobs if job.request.tenant not in present)
        job = next((job for job in absent if not job.restoring and not self.awaits(job)), None)
        if job is None:
            return None
        victims, others = list[Row](), above_share(self.rows)
        while not (room := self._room(job, victims)).fits:
            self.record.to_reclaim = self.record.to_reclaim or room.need
            if (row := next(others, None)) is None:
                return None
            victims.append(row)
        for row in victims:
            self._remove(row, self.record.to_preempt)
        return job if victims else None

    def choose_prompt(self, first: PrefillJob | None) -> PrefillJob | None:
        """The most urgent prompt that fits, unless a prompt in prefill goes first. `first`: the one
        for which rows give way."""
        tried = 0
        for job in (*filter(None, (first,)), *self.jobs):
            if job.restoring:
                continue
            if job.admitted:  # it goes on: only more urgent prompts were tried before it
                return None
            if self.awaits(job):
                continue
            # `Scheduler.fits_background` has found room for a background prefill
            if job.request.background or self._admit(job):
                return job
            tried += 1
            waited = self.record.now - job.request.queued
            if waited > PATIENCE_SECONDS or tried == TRIED_PER_STEP:
                # no new prompt overtakes it, but admitted prompts must continue, or it never fits
                return None
        return None

    def awaits(self, job: PrefillJob) -> bool:
        """Whether a prompt should wait, because a started one will store its prefix soon."""
        return any(provides(leader, job) for leader in self.jobs if leader.admitted)

    def _admit(self, job: PrefillJob) -> bool:
        """Whether a prompt fits beside the live rows."""
        room = self._room(job)
        if not room.fits:
            self.record.to_reclaim = self.record.to_reclaim or room.need
            return False
        self.record.to_reclaim, self.record.admit_in_place = room.need, room.in_place
        if room.trims:
            self._trim(self.live)
        return True

    def _remove(self, row: Row, into: list[Row]) -> None:
        into.append(row)
        self.rows.remove(row)
        self._leaving.append(row)

    def _need(self, rows: Sequence[Row], offers: Offers = NO_OFFERS) -> int:
        """Bytes of rows, without the capacity that some of them give back (`record.to_trim`)."""
        spare = sum(self.ledger.spare(row) for row in rows if row in self.record.to_trim)
        return self.ledger.reservation(rows, offers) - spare

    def _offers_to(self, job: PrefillJob) -> Sequence[Lease | None]:
        if job not in self.offers:
            prefixes = self.scheduler.prefixes
            self.offers[job] = () if prefixes is None else prefixes.offers(job)
        return self.offers[job]

    def _limit(
        self, need: int, leases: Sequence[Lease | None] = (), leaving: Sequence[Row] = ()
    ) -> int:
        """Bytes for live rows once memory is reclaimed for `need`."""
        pinned = self._newly_pinned(leases, leaving)
        limit = self.ledger.available() - pinned
        return limit if need <= limit else limit + self.ledger.unloadable(need, pinned)

    def _newly_pinned(self, leases: Sequence[Lease | None], also_leaving: Sequence[Row]) -> int:
        """By how many bytes that part of the prefix cache grows that cannot be evicted, if `leases`
        are acquired and more rows leave. Negative: more is freed than leased."""
        leased, leaving = buffers_of(leases), [*self._leaving, *also_leaving]
        pinned = sum(buffers.stored for buffers in leased if not buffers.in_use)
        if not (left := buffers_of(row.lease for row in leaving)):
            return pinned  # as nearly always: the rest takes time in a long queue
        waiting = (row for job in self.scheduler.waiting for row in job.rows)
        others = [row for row in (*self.scheduler.running, *waiting) if row not in leaving]
        freed = left - buffers_of(row.lease for row in others) - leased
        return pinned - sum(buffers.stored for buffers in freed)

    def _trim(self, rows: Sequence[Row]) -> None:
        """Free the capacity of rows that is only for later turns."""
        spare = [row for row in rows if self.ledger.spare(row)]
        self.record.to_trim |= {row: self.ledger.kv_needed(row) for row in spare}

    def _room(self, job: PrefillJob, leaving: Sequence[Row] = ()) -> Room:
        """The room for a prompt beside the live rows without those that are `leaving`. It uses
        stored buffers in place; if it does not fit so and no row is live, it copies."""
        rows = [row for row in self.live if row not in leaving]
        if len(rows) + len(job.rows) > self.ledger.limits.max_rows:
            return Room(0, fits=False)
        room = self._room_beside(rows, job, leaving, in_place=True)
        if room.fits or rows:
            return room
        # behind a prefix, a row may need more than without it, perhaps more than is available
        copied = self._room_beside(rows, job, leaving, in_place=False)
        return copied if copied.fits else room

    def _room_beside(
        self, rows: Sequence[Row], job: PrefillJob, leaving: Sequence[Row], *, in_place: bool
    ) -> Room:
        """`in_place`: what it uses in place stays, and is no part of its need. Else it copies. If
        it does not fit, even with the spare capacity of rows, its need includes what it would use:
        memory is reclaimed for it, but not from that."""
        leases = self._offers_to(job) if in_place else ()
        need = self._need([*rows, *job.rows], dict(zip(job.rows, leases, strict=False)))
        if not in_place and job.uses_prefix_cache:
            need -= self.scheduler.fork_bytes(len(job.tokens), len(job.rows))
        images = self.ledger.image_bytes()
        limit = self._limit(need + images, leases, leaving)
        # images are temporary, and may be its own, so none block a prompt that would run alone
        if need + (images if rows else 0) <= limit:
            return Room(need + images, in_place=in_place)
        spare = sum(self.ledger.spare(row) for row in rows if row not in self.record.to_trim)
        if spare and need - spare + images <= limit:
            return Room(need - spare + images, in_place=in_place, trims=True)
        pinned = max(0, self._newly_pinned(leases, leaving))
        return Room(need + images + pinned, fits=False)


def buffers_of(leases: Iterable[Lease | None]) -> set[RowBuffers]:
    return {buffers for lease in leases if lease is not None for buffers in lease.buffers}


def above_share(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that give way to a tenant without rows, one after the other: the youngest of the
    tenant with the most rows. Each tenant keeps one."""
    remaining = sorted(rows, key=lambda row: (row.request.arrived, row.index))
    counts = Counter(row.request.tenant for row in remaining)
    while counts:
        tenant, count = counts.most_common(1)[0]
        if count < 2:
            return
        at = max(at for at, row in enumerate(remaining) if row.request.tenant == tenant)
        counts[tenant] -= 1
        yield remaining.pop(at)


@dataclass(frozen=True)
class Room:
    need: int
    """Bytes of all rows. 0: there are too many rows."""
    fits: bool = True
    in_place: bool = False
    trims: bool = False
    """Whether other rows give back their spare capacity for it."""


def prefilling(jobs: Iterable[PrefillJob]) -> list[Row]:
    return [row for job in jobs if job.admitted and not job.request.background for row in job.rows]


def provides(leader: PrefillJob, job: PrefillJob) -> bool:
    """Whether `leader` will soon provide much of `job`'s prompt."""
    if leader is job or not leader.uses_prefix_cache or leader.request.salt != job.request.salt:
        return False
    if leader.ids is None or job.ids is None:
        return False
    shared = min(common(leader.ids, job.ids), len(leader.tokens), len(job.tokens) - 1)
    return shared - job.estimated_cached > WORTH_WAITING
