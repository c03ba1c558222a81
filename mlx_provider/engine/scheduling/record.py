"""What a step does, as a value, and how rows and prompts share the memory in it. Imports no mlx."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..request import PrefillJob, Request, Row
from ..sizes import STEP_TOKENS
from .admission import above_share
from .chunking import StepPlan

if TYPE_CHECKING:
    from .scheduler import Scheduler

Trims = Mapping[Row, int]
"""Rows that give back capacity, and the tokens that they keep room for."""


@dataclass(frozen=True)
class Start:
    """Where the prefill of a prompt will begin."""

    done: int = 0
    cuts: Sequence[int] = ()
    scored: bool = False
    """Its tokens are scored first."""


@dataclass(frozen=True)
class StepRecord:
    """One step. The fields before `plan` are what the engine does first, in their order."""

    now: float
    """When the step began, in monotonic seconds."""
    expired: Sequence[Request] = ()
    """Requests that end because their time limit has passed."""
    cut: Sequence[Row] = ()
    """Rows that end because memory is full."""
    trims: Trims = field(default_factory=dict)
    preempted: Sequence[Row] = ()
    """Rows that free their memory and wait."""
    reclaim: int = 0
    """Bytes of live rows for which prefixes and models without requests make room. 0: nothing to
    do."""
    admitted: PrefillJob | None = None
    claims: bool = False
    """The admitted prompt leases the stored buffers that it will use in place, before memory is
    reclaimed. Prefixes that it will copy are not protected."""
    begins: Sequence[PrefillJob] = ()
    """Prompts that get a cache, or start a restore from disk."""
    plan: StepPlan = field(default_factory=StepPlan)
    need: int | None = None
    """Bytes of all rows. `None`: not counted, because no row has outgrown its reservation."""
    limit: int = 0
    """Bytes that were available for them."""

    @property
    def runs(self) -> bool:
        plan = self.plan
        return bool(plan.rows) or any((plan.chunk, plan.scored, plan.embedded))

    def summary(self) -> dict[str, Any]:
        """JSON-able, without prompt text: for logs, traces and comparisons."""
        plan, chunk = self.plan, self.plan.chunk
        return {
            "expired": [request.id for request in self.expired],
            "trims": {_name(row): tokens for row, tokens in self.trims.items()},
            "cut": [_name(row) for row in self.cut],
            "preempted": [_name(row) for row in self.preempted],
            "reclaim": self.reclaim,
            "admitted": None if self.admitted is None else self.admitted.request.id,
            "begins": [job.request.id for job in self.begins],
            "rows": [_name(row) for row in plan.rows],
            "chunk": chunk and [chunk.job.request.id, chunk.start, chunk.stop],
            "mixed": plan.mixed,
            "scored": plan.scored and plan.scored.request.id,
            "embedded": plan.embedded and plan.embedded.request.id,
        }


def _name(row: Row) -> str:
    return f"{row.request.id}.{row.index}"


@dataclass
class StepBuilder:
    """A step while it is decided: the rows and prompts that stay, and what happens to others."""

    scheduler: Scheduler
    expired: Sequence[Request]
    trims: dict[Row, int] = field(default_factory=dict)
    cut: list[Row] = field(default_factory=list)
    preempted: list[Row] = field(default_factory=list)
    reclaim: int = 0
    claims: bool = False
    need: int | None = None
    limit: int = 0
    _released: int = 0
    """Bytes of the prefix cache that rows no longer use."""

    def __post_init__(self) -> None:
        gone = {*self.expired}
        self.admission = self.scheduler.admission
        self.budget = self.admission.budget
        self.rows = [row for row in self.scheduler.running if row.request not in gone]
        self.jobs = [job for job in self.scheduler.waiting if job.request not in gone]
        self._released = sum(row.stored for request in gone for row in request.rows)

    @property
    def live(self) -> list[Row]:
        return [*prefilling(self.jobs), *self.rows]

    def fit_rows(self) -> None:
        """If rows have outgrown the memory, they give back spare capacity, or else the youngest
        waits, or ends if it could never continue."""
        before, limit = self.scheduler.fitting_limit, self.budget.available()
        if limit == before and not any(map(self.admission.exceeds, self.rows)):
            return
        need = self._need(self.live)
        grown = need > self.scheduler.reclaimed_bytes
        if need > self._limit(need):
            self._give_back(self.live)
            need = self._need(self.live)
        while need > self._limit(need) and self.rows:
            active = len(self.live)
            row = max(self.rows, key=lambda row: (row.request.arrived, row.index))
            waits = self.admission.may_wait(row, active)
            self._remove(row, self.preempted if waits else self.cut)
            need = self._need(self.live)
        self.need, self.limit = need, self._limit(need)
        self.reclaim = need if grown else 0

    def displace(self, now: float) -> PrefillJob | None:
        """Preempt rows so that the first prompt of an account without rows can be admitted. Returns
        the prompt. `None`: no account has only prompts that wait, there is room, or this would not
        make enough."""
        shares, present = self.scheduler.shares, {row.request.account for row in self.live}
        if not shares.several or not present:
            return None
        absent = [j for j in self.jobs if j.request.account not in present and not j.restoring]
        if not absent:
            return None
        job = next(job for job in self.scheduler.in_order(now, self.jobs) if job in absent)
        if self._room(job) is not None:
            return None
        rows: list[Row] = []
        for row in above_share(self.rows):
            rows.append(row)
            if self._room(job, rows) is not None:
                for each in rows:
                    self._remove(each, self.preempted)
                return job
        return None

    def admit(self, job: PrefillJob, *, claims: bool) -> bool:
        """Whether a prompt fits beside the live rows."""
        room = self._room(job, claims=claims)
        if room is None:
            return False
        self.reclaim, self.claims = room.need, room.claims
        if room.trims:
            self._give_back(self.live)
        return True

    def _remove(self, row: Row, into: list[Row]) -> None:
        into.append(row)
        self.rows.remove(row)
        self._released += row.stored

    def _need(self, rows: Sequence[Row]) -> int:
        spare = sum(self.admission.spare(row) for row in rows if row in self.trims)
        return self.admission.reservation(rows) - spare

    def _limit(self, need: int) -> int:
        """Bytes for live rows once memory is reclaimed for `need`."""
        limit = self.budget.available() + self._released
        return limit if need <= limit else limit + self.budget.unloadable(need)

    def _give_back(self, rows: Sequence[Row]) -> None:
        """Free the capacity of rows that is only for later turns."""
        spare = [row for row in rows if self.admission.spare(row)]
        self.trims |= {row: self.admission.kv_needed(row) for row in spare}

    def _room(
        self, job: PrefillJob, without: Sequence[Row] = (), *, claims: bool = True
    ) -> Room | None:
        """The room for a prompt beside the live rows, `without` some. `None`: it does not fit.
        `claims`: what it will use of the prefix cache is no part of its need, and stays. Images are
        temporary, and may belong to the prompt itself, so they do not block a prompt that would run
        alone."""
        rows = [row for row in self.live if row not in without]
        if len(rows) + len(job.rows) > self.admission.limits.max_rows:
            return None
        if claims:
            self.scheduler.claim(job)
        need, images = self._need([*rows, *job.rows]), self.budget.image_bytes()
        if not claims and rows and job.uses_prefix_cache:
            # a step more for it behind a prefix, and for the row that has the prefix now
            need += self.budget.row_bytes(2 * STEP_TOKENS)
        limit = self._limit(need + images)
        spare = sum(self.admission.spare(row) for row in rows if row not in self.trims)
        for row in job.rows:
            row.lease = None
        if need + (images if rows else 0) <= limit:
            return Room(need + images, claims, trims=False)
        if spare and need - spare + images <= limit:
            return Room(need - spare + images, claims, trims=True)
        self.reclaim = self.reclaim or need + images
        # behind a prefix, a row may take more than without it, which may be all that there is
        return self._room(job, claims=False) if claims and not rows else None


@dataclass(frozen=True)
class Room:
    need: int
    """Bytes of all rows."""
    claims: bool
    trims: bool
    """Whether other rows give back their spare capacity for it."""


def prefilling(jobs: Iterable[PrefillJob]) -> list[Row]:
    return [row for job in jobs if job.admitted and not job.request.ahead for row in job.rows]
