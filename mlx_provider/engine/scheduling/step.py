"""What one step does, and which rows and prompts take part. Imports no mlx."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..prefix_cache.tree import common
from ..request import PrefillJob, Request, Row
from .ledger import MemoryCheck, Room, StepMemory

if TYPE_CHECKING:
    from .scheduler import Scheduler

PATIENCE_SECONDS = 30.0
"""After this time, a prompt that does not fit stops later prompts from overtaking it."""
TRIED_PER_STEP = 8
"""Most prompts per step that are tried: each counts the bytes of all rows."""
WORTH_WAITING = 256
"""A prompt waits for an admitted one that will store more than so many tokens of its prefix."""


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
    mixed: bool = False  # whether the chunk is in the pass of the rows, not in its own pass
    pass_seconds: float = 0.0  # expected seconds of the rows' pass, including a mixed chunk
    passes: int = 1  # passes in which the rows decode: several if they do not share one
    chunk_seconds: float = 0.0  # expected seconds of the chunk's own pass
    prepared: PrefillJob | None = None
    """The prompt that is scored, or whose media run through the vision tower, behind the rows'
    pass, before its next chunk."""
    preparing_seconds: float = 0.0
    """Time limit for that in this step. At least one piece, or image, runs."""


@dataclass
class StepRecord:
    """What `Engine.run` does first, in this order (with `Scheduler.apply` for the queue), then the
    plan. The engine rests after an `empty` one."""

    now: float  # when the step began, in monotonic seconds
    to_expire: Sequence[Request] = ()  # requests whose time limit has passed
    to_end: list[Row] = field(default_factory=list)  # rows whose memory can never suffice again
    to_trim: dict[Row, int] = field(default_factory=dict)
    """Rows that give back spare capacity, and the tokens that they keep room for. They may also be
    ended or preempted, which is decided later."""
    admit_in_place: bool = False
    """Whether the prompt to admit leases the stored buffers that it will use in place, without a
    copy, before rows are stored and memory is reclaimed. What it will copy is not protected."""
    to_preempt: list[Row] = field(default_factory=list)  # rows that free their memory and wait
    to_reclaim: int = 0
    """Bytes that all rows need in sum, with the prompt to admit, else with the first one that was
    refused: idle models and prefixes go until they fit."""
    to_admit: PrefillJob | None = None
    to_look_up: Sequence[PrefillJob] = ()
    """Prompts that were tried. `schedule` may not keep their matches, so `run` looks them up."""
    to_begin: Sequence[PrefillJob] = ()
    """Prompts that get a cache, or start a restore from disk. The passes are then in another record
    of the step, as only now is it known where in a prompt its first chunk starts."""
    plan: StepPlan = field(default_factory=StepPlan)
    memory_check: MemoryCheck | None = None
    """`None`: nothing was counted, as no row has outgrown the last count."""

    @property
    def empty(self) -> bool:
        """Whether nothing runs, begins or ends. Rows may be trimmed, and memory reclaimed."""
        orders = (self.to_expire, self.to_end, self.to_preempt, self.to_admit, self.to_begin)
        return not any((*orders, self.plan.rows, self.plan.chunk, self.plan.prepared))


# -- how it is decided


class StepBuilder:
    """A step while it is decided: the rows and prompts that stay, and what happens to others."""

    def __init__(self, scheduler: Scheduler, record: StepRecord) -> None:
        self.scheduler, self.record, self._reclaims_for_refused = scheduler, record, False
        late = record.to_expire
        self.rows = [row for row in scheduler.running if row.request not in late]
        left = [job for job in scheduler.waiting if job.request not in late]
        self.jobs = scheduler.in_order(record.now, left)
        # what only ending rows use of the prefix cache can be evicted
        ending = [row for request in late for row in request.rows]
        self.memory = StepMemory(scheduler.ledger, scheduler.prefixes, [*self.rows, *ending])
        record.to_trim = self.memory.trims  # `memory.trim` fills it

    @property
    def live(self) -> list[Row]:
        """Rows that are charged. A background prefill is not: it starts only in unused memory."""
        return [*prefilling(self.jobs), *self.rows]

    def fit_rows(self) -> None:
        """If rows have outgrown the memory, or the limit has moved, they give back spare capacity,
        or else the youngest waits, or ends if it could never continue."""
        last, memory, ledger = self.scheduler.memory_check, self.memory, self.memory.ledger
        if last.limit == ledger.available() and not any(map(ledger.exceeds, self.rows)):
            return  # they fitted in the last count, and nothing has changed since
        check = memory.check(self.live)
        if not check.fits:
            memory.trim(self.live)
            check = memory.check(self.live)
        while self.rows and not check.fits:
            row = max(self.rows, key=lambda row: (row.request.arrived, row.index))
            can_return = ledger.may_wait(row, len(self.live))
            (self.record.to_preempt if can_return else self.record.to_end).append(row)
            self.rows.remove(row)
            check = memory.check(self.live)
        self.record.memory_check = check
        self.record.to_reclaim = check.need

    def choose_admission(self, first: PrefillJob | None) -> PrefillJob | None:
        """The most urgent prompt in the queue that fits; `self.jobs` is in the order of urgency.
        `None`: none fits, or one in prefill is more urgent. `first`: rows give way for it."""
        tried = 0
        for job in self.jobs if first is None else [first, *self.jobs]:
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

    # -- whether a prompt fits, and whether rows give way to it

    def _admit(self, job: PrefillJob) -> bool:
        """Whether a prompt fits beside the live rows."""
        room = self._try_room(job, self.live)
        if room.fits:
            self.record.to_reclaim, self.record.admit_in_place = room.need, room.in_place
        if room.trims:
            self.memory.trim(self.live)
        return room.fits

    def _try_room(self, job: PrefillJob, rows: Sequence[Row]) -> Room:
        """The first prompt that lacks bytes has memory reclaimed for it while it waits."""
        room = self.memory.room(job, rows)
        if not (room.fits or self._reclaims_for_refused):
            self._reclaims_for_refused = room.need > 0
            self.record.to_reclaim = max(self.record.to_reclaim, room.need)
        return room

    def displace(self) -> PrefillJob | None:
        """Preempt rows so that the first prompt of a tenant without rows can be admitted. Returns
        the prompt. `None`: every tenant has rows, the prompt fits anyway, or a tenant would keep
        less memory than the prompt takes, which is no fairer than before."""
        present = {row.request.tenant for row in self.live}
        absent = (job for job in self.jobs if job.request.tenant not in present)
        job = next((job for job in absent if not job.restoring and not self.awaits(job)), None)
        if job is None or not present:
            return None
        victims, others, kept = list[Row](), above_share(self.rows), self.live
        while not (room := self._try_room(job, kept)).fits:
            if (victim := next(others, None)) is None:
                return None
            victims.append(victim)
            kept.remove(victim)
            left = [row for row in kept if row.request.tenant == victim.request.tenant]
            ledger = self.memory.ledger
            if room.need > 0 and ledger.reservation(left) < ledger.reservation(job.rows):
                return None
        self.record.to_preempt += victims
        self.rows = [row for row in self.rows if row not in victims]
        return job if victims else None


def above_share(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that give way to a tenant without rows, one after the other: the youngest of the
    tenant with the most rows. Each tenant keeps one."""
    rows_of = defaultdict[str, list[Row]](list)
    for row in sorted(rows, key=lambda row: (row.request.arrived, row.index)):
        rows_of[row.request.tenant].append(row)
    while len(richest := max(rows_of.values(), key=len, default=[])) > 1:
        yield richest.pop()


def prefilling(jobs: Iterable[PrefillJob]) -> list[Row]:
    return [row for job in jobs if job.admitted and not job.request.background for row in job.rows]


def provides(leader: PrefillJob, job: PrefillJob) -> bool:
    """Whether `leader` will soon provide much of `job`'s prompt."""
    unrelated = leader is job or leader.request.salt != job.request.salt
    if unrelated or not leader.uses_prefix_cache or leader.ids is None or job.ids is None:
        return False
    shared = min(common(leader.ids, job.ids), len(leader.tokens), len(job.tokens) - 1)
    return shared - job.estimated_cached > WORTH_WAITING
