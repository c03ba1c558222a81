"""The queue, the rows that decode, and what a step runs. Imports no mlx.

A step asks twice: `admit` lets one prompt in, `plan` says what runs, and changes nothing. Rows that
decode do so in every step, but for brief prompts that may precede them. One prompt at a time is
prefilled, the one with the least work left, aged so that a long prompt is never starved. Its chunk
is mixed into the pass of the rows where it may be. It is the smallest with nearly the best rate
among those whose step takes at most three quarters of a second. Steps without a chunk follow, until
a token of the rows has taken no longer than the stall target on average. So streams keep a pace,
and the prompt has the rest of the device, in passes that are worth it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from ..fixed_shapes import FixedShapes
from ..request import Phase, PrefillJob, Request, Row
from .admission import Admission, Budget, Limits
from .chunking import IDLE_SECONDS, Chunking
from .costs import Costs
from .plan import Chunk, StepPlan
from .shared_prefix import awaits

__all__ = ["Budget", "Limits", "Scheduler"]

AGING = 0.1
"""A second of waiting weighs as much as this many seconds of prefill work."""
PATIENCE_SECONDS = 30.0
"""After which a prompt that does not fit keeps later ones from overtaking it."""


class Scheduler:
    """Queue, admission and order. `now` is monotonic seconds throughout."""

    def __init__(
        self,
        limits: Limits,
        budget: Budget,
        costs: Costs | None = None,
        *,
        grid: int = 1,
        fixed: FixedShapes | None = None,
    ) -> None:
        """`grid`, `fixed`: see `Chunking`."""
        self.admission = Admission(limits, budget)
        self.chunking = Chunking(limits, costs or Costs(), grid=grid, fixed=fixed)
        self.costs = self.chunking.costs
        self.waiting: list[PrefillJob] = []
        """Prompts that are queued or in prefill."""
        self.running: dict[Row, None] = {}
        """The rows that decode, in the order in which they joined: nobody else keeps a list."""
        self.reclaimed = 0
        """Bytes for which others were last asked to make room; whoever reads it may reset it."""
        self._owed = 0.0
        """Seconds that rows which decode have waited for chunks beyond their fair time."""
        self._settled = 0
        """Bytes of live rows for which memory was last reclaimed."""
        self._fitting: int | None = None
        """The limit within which all rows were last found; they stay so until one outgrows what
        was set aside for it."""

    # -- coming and going

    def check(self, request: Request, arriving: int = 0) -> None:
        """Whether a request may queue; reads only, so any thread may ask.

        `arriving`: requests that were let in but are not queued yet. Raises as `Admission.check`.
        """
        self.admission.check(request, self.queued + arriving)

    def submit(self, request: Request, now: float) -> PrefillJob:
        """Queue a request that passed `check`."""
        if not request.arrived:
            request.arrived = now
        # time spent before the queue (loading a model, say) gives no precedence in it
        tokens = request.prompt.tokens if request.inputs is None else request.inputs.tokens[0]
        job = PrefillJob(request, list(request.rows), tokens, arrived=now)
        self.waiting.append(job)
        return job

    def admit(self, now: float) -> PrefillJob | None:
        """Let in the most urgent prompt that fits, unless one that is in prefill goes first.

        Reclaims memory for it, and sets that aside for its rows. `None`: no prompt is let in.
        """
        for job in self._by_urgency(now):
            if job.restoring:
                continue
            if job.admitted:
                return None
            if awaits(job, self.waiting):
                continue
            if self.active_rows + len(job.rows) <= self.admission.limits.max_rows:
                need, beside = self._needed(job)
                self._reclaim(need + beside)
                if self.admission.fits(need, beside if self.active_rows else 0):
                    job.aged = now - job.arrived
                    return self.let_in(job)
            if now - job.arrived > PATIENCE_SECONDS:
                # nobody new overtakes it any more; what was let in must go on, or it never fits
                return None
        return None

    def let_in(self, job: PrefillJob | None) -> PrefillJob | None:
        """Memory is set aside for a prompt."""
        if job is not None:
            job.admitted = True
            job.request.phase = Phase.PREFILL
        return job

    def passed(self, chunk: Chunk) -> None:
        """A chunk has run, for which the other prompts in prefill have waited."""
        seconds = self.costs.pass_of(0, 0, chunk.size, chunk.start)
        for job in self.waiting:
            if job.admitted and job is not chunk.job:
                job.aged += seconds

    def join(self, job: PrefillJob) -> None:
        """The prompt is in the cache: its rows may decode, each once it has its first token."""
        self.waiting.remove(job)
        job.request.phase = Phase.DECODE

    def decode(self, row: Row) -> None:
        """A row decodes from now on."""
        self.running[row] = None

    def leave(self, rows: Iterable[Row]) -> None:
        """Rows decode no more."""
        for row in rows:
            del self.running[row]

    def drop(self, request: Request) -> list[PrefillJob]:
        """Forget a request wherever it is; the prefills that end so."""
        request.phase = Phase.DONE
        gone = [job for job in self.waiting if job.request is request]
        self.waiting = [job for job in self.waiting if job.request is not request]
        self.leave([row for row in request.rows if row in self.running])
        return gone

    def retry(self, rows: Iterable[Row]) -> list[PrefillJob]:
        """Queue rows again whose caches a device failure has corrupted."""
        rows = list(rows)
        for row in rows:
            row.retry_alone = True
        return [self._again(row, admitted=True) for row in rows]

    def preempt(self, row: Row) -> PrefillJob:
        """Take a row's place in memory; it goes on from its committed tokens when it fits."""
        return self._again(row, admitted=False)

    def _again(self, row: Row, *, admitted: bool) -> PrefillJob:
        self.leave([row])
        arrived = row.request.arrived
        # where passes are fixed, its reply is what passes over rows give, not those over prompts
        tokens = row.request.prompt.tokens if self.chunking.fixed else row.all_tokens
        job = PrefillJob(row.request, [row], tokens, arrived, admitted)
        if row.request.kept is not None:
            job.thin_out(row.request.kept)
        self.waiting.append(job)
        return job

    # -- the plan

    def plan(
        self, now: float, *, mixes: bool = False, stalled: float = 0.0, passes: int = 1
    ) -> StepPlan:
        """What the next step runs; changes nothing.

        `mixes`: chunks may share the pass of rows that decode; `stalled`: seconds for which those
        have waited for their token; `passes`: forward passes that one token of each takes.
        """
        sizes, rows = self.chunking, tuple(self.running)
        target = sizes.limits.stall_target
        alone = sizes.seconds(rows, passes=passes) if rows else 0.0
        ready = (job for job in self._by_urgency(now) if job.admitted and not job.restoring)
        job = next(ready, None)
        if job is None:
            return StepPlan(rows, pass_seconds=alone)
        if rows and self._owed and not self._precedes(job):
            return StepPlan(rows, pass_seconds=alone)
        if job.scoring is not None:
            most = target if rows else IDLE_SECONDS
            return StepPlan(rows, pass_seconds=alone, scored=job, scoring_seconds=most)
        if job.own_pass:
            chunk = sizes.even_chunk(job)
            own = sizes.own_pass(job, chunk.size)
            return StepPlan(rows, chunk, pass_seconds=alone, chunk_seconds=own)
        if rows and mixes and job.text_follows:
            chunk = sizes.chunk(job, rows, alone, mixed=True)
            if sizes.pays_mixed(chunk, rows, alone):
                together = sizes.seconds(rows, chunk)
                return StepPlan(rows, chunk, mixed=True, pass_seconds=together)
        chunk = sizes.chunk(job, rows, alone)
        own = sizes.own_pass(job, chunk.size)
        if rows and self._precedes(job) and stalled + own <= target:
            return StepPlan((), chunk, chunk_seconds=own)
        return StepPlan(rows, chunk, pass_seconds=alone, chunk_seconds=own)

    def ran(self, plan: StepPlan) -> None:
        """A step is on its way. What it takes beyond a fair time is repaid by steps without a
        chunk, so that a token of the rows takes no longer than that on average."""
        took = plan.pass_seconds + plan.chunk_seconds + plan.scoring_seconds
        alone = self.chunking.seconds(plan.rows) if plan.mixed else plan.pass_seconds
        fair = self.chunking.fair(alone) if plan.rows else 0.0
        self._owed = max(0.0, self._owed + took - fair) if self.running else 0.0

    def _by_urgency(self, now: float) -> list[PrefillJob]:
        if len(self.waiting) < 2:
            return self.waiting
        return sorted(self.waiting, key=partial(self._urgency, now))

    def _urgency(self, now: float, job: PrefillJob) -> float:
        """A prompt that is prefilled gets no older: one that comes never waits for all of it."""
        waited = job.aged if job.admitted else now - job.arrived
        return self.chunking.rest(job) - AGING * waited

    def _precedes(self, job: PrefillJob) -> bool:
        """Whether a prompt goes before rows decode, as long as those wait no longer than they may.

        Brief prompts that come together are prefilled together: their rows then decode in the
        same steps, and not in twice as many.
        """
        return self.chunking.brief(job)

    # -- memory

    def overflowing(self) -> tuple[Row, bool] | None:
        """The row to preempt, and whether it can go on later: the youngest, once rows have
        outgrown what there is.

        Reclaims memory first. `None`: all fits.
        """
        budget = self.admission.budget
        limit = budget.available()
        if limit == self._fitting and not any(map(self.admission.outgrown, self.running)):
            return None
        need = self.live_bytes
        if need > self._settled:
            self._reclaim(need)
            limit = budget.available()
        self._settled = need
        self._fitting = limit if need <= limit else None
        if need <= limit or not self.running:
            return None
        row = max(self.running, key=lambda row: (row.request.arrived, row.index))
        return row, self.admission.may_wait(row, self.active_rows)

    def _reclaim(self, need: int) -> None:
        """Have others make room, so that live rows may hold so many bytes."""
        self.reclaimed = need
        self.admission.budget.reclaim(need)

    def reservation(self, rows: Iterable[Row]) -> int:
        """See `Admission.reservation`."""
        return self.admission.reservation(rows)

    def _needed(self, job: PrefillJob) -> tuple[int, int]:
        """Bytes of live rows with those of a prompt, and of images beside them.

        Images pass, so they keep no prompt out that would run alone: they may be its own.
        """
        return self.reservation([*self._live(), *job.rows]), self.admission.budget.beside()

    # -- what is here

    @property
    def queued(self) -> int:
        """Requests that were not let in yet."""
        return sum(not job.admitted for job in self.waiting)

    @property
    def active_rows(self) -> int:
        """Rows that decode or will, once their prompt is through."""
        return len(self.running) + sum(len(job.rows) for job in self.waiting if job.admitted)

    @property
    def live_bytes(self) -> int:
        """Bytes set aside for rows that decode or prefill."""
        return self.reservation(self._live())

    def _live(self) -> list[Row]:
        return [*(row for job in self.waiting if job.admitted for row in job.rows), *self.running]

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def requests(self) -> list[Request]:
        """Every request that has not ended, oldest first."""
        found = dict.fromkeys([job.request for job in self.waiting])
        found |= dict.fromkeys([row.request for row in self.running])
        return sorted(found, key=lambda request: request.arrived)
