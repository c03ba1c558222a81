"""The queue, the rows that decode, and the plan of a step. Imports no mlx.

A step calls `admit`, which admits one prompt, then `plan`, which is read-only. Rows decode in every
step, except when brief prompts may precede them. One prompt at a time is prefilled: the one with
the least work left, with aging so that a long prompt is never starved. Its chunk shares the pass of
the rows if that is faster. It has one of a few fixed sizes: the smallest with nearly the best rate,
among those whose step takes little more than the stall target, or else at most 0.75 seconds. Steps
without a chunk follow until the average time of a token is within the stall target. So streams keep
a steady pace, and the prompt gets the rest of the device in efficient passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ..fixed_shapes import FixedShapes
from ..kv_capacity import STEP_TOKENS
from ..prefix_cache.tree import common
from ..request import Phase, PrefillJob, Request, Row
from .admission import OUTPUT_TOKEN, Admission, Budget, FairShares, Limits, above_share
from .chunking import IDLE_SECONDS, Chunk, Chunking, StepPlan
from .costs import Costs

__all__ = ["Budget", "Limits", "Scheduler"]

AGING = 0.1
"""One second of waiting counts as this many seconds of prefill work."""
PATIENCE_SECONDS = 30.0
"""After this time, a prompt that does not fit stops later prompts from overtaking it."""
CLAIMS_PER_STEP = 4
"""Prompts whose use of the prefix cache is looked up again in a step that admits one of them."""


WORTH_WAITING = 256
"""Least tokens that a started prompt must be about to store of another one, which waits for it."""


class Scheduler:
    """Queue, admission and order. `now` is in monotonic seconds."""

    def __init__(
        self,
        limits: Limits,
        budget: Budget,
        costs: Costs | None = None,
        *,
        grid: int = 1,
        fixed: FixedShapes | None = None,
        claim: Callable[[PrefillJob], None] = lambda job: None,
        trim: Callable[[Row, int], None] = lambda row, tokens: None,
    ) -> None:
        """`grid`, `fixed`: see `Chunking`. `claim`: lets a prompt hold what it will use of the
        prefix cache in place. `trim`: frees a row's capacity behind this many tokens."""
        self.admission = Admission(limits, budget)
        self.chunking = Chunking(limits, costs or Costs(), grid=grid, fixed=fixed)
        self.costs = self.chunking.costs
        self.waiting: list[PrefillJob] = []
        """Prompts in the queue or in prefill."""
        self.running: dict[Row, None] = {}
        """The rows that decode, in the order in which they joined. This is the only such list."""
        self.reclaimed = 0
        """The bytes of the last reclaim request. The reader may reset it."""
        self._claim = claim
        self._trim = trim
        self._shares = FairShares()
        self._preempted_for: PrefillJob | None = None
        """The prompt for which rows of other accounts have given way."""
        self._itl_debt = 0.0
        """Seconds that decoding rows have waited for chunks beyond their fair time."""
        self._settled = 0
        """Bytes of live rows for which memory was last reclaimed."""
        self._fitting: int | None = None
        """The limit at which all rows were last found to fit. It holds until a row exceeds its
        reservation."""

    # -- coming and going

    def check(self, request: Request, arriving: Sequence[str] = ()) -> None:
        """Check whether a request may queue. Read-only, so any thread may call it. `arriving`: the
        accounts of accepted requests that are not queued yet. Raises the errors of
        `Admission.check`."""
        queued = [*(job.request.account for job in self._queued()), *arriving]
        self.admission.check(request, len(queued), first=request.account not in queued)

    def submit(self, request: Request, now: float) -> PrefillJob:
        if not request.arrived:
            request.arrived = now
        self._shares.join(request, self.requests())
        # time before the queue (for example to load a model) gives no precedence in it
        tokens = request.prompt.tokens if request.inputs is None else request.inputs.tokens[0]
        job = PrefillJob(request, list(request.rows), tokens, arrived=now)
        self.waiting.append(job)
        return job

    def admit(self, now: float) -> PrefillJob | None:
        """Admit the most urgent prompt that fits, unless a prompt in prefill goes first. Reclaims
        memory for it and reserves it. `None`: no prompt is admitted."""
        preempted_for, self._preempted_for, tried = self._preempted_for, None, 0
        for job in (*filter(None, (preempted_for,)), *self._in_order(now)):
            if job.restoring:
                continue
            if job.admitted:
                return None
            if awaits(job, self.waiting):
                continue
            claims = tried < CLAIMS_PER_STEP
            tried += 1
            # `fits_ahead` has found its memory free
            if job.request.ahead or self._make_room(job, claims=claims):
                job.aged = now - job.arrived
                job.admitted, job.request.phase = True, Phase.PREFILL
                return job
            if now - job.arrived > PATIENCE_SECONDS:
                # no new prompt overtakes it, but admitted prompts must continue, or it never fits
                return None
        return None

    def passed(self, chunk: Chunk) -> None:
        if not chunk.job.request.ahead:
            self._shares.charge(chunk.job.request, chunk.size)
        self._waited_for(chunk.job, self.costs.pass_of(0, 0, chunk.size, chunk.start))

    def _waited_for(self, own: PrefillJob | None, seconds: float) -> None:
        for job in self.waiting:
            if job.admitted and job is not own:
                job.aged += seconds

    def embedded(self, plan: StepPlan, seconds: float) -> None:
        """The vision tower has run for these seconds. The other prompts in prefill have waited for
        it, and decoding rows for what exceeds the plan."""
        self._waited_for(plan.embedded, seconds)
        self._itl_debt += max(0.0, seconds - plan.embedding_seconds) if self.running else 0.0

    def join(self, job: PrefillJob) -> None:
        self.waiting.remove(job)
        job.request.phase = Phase.DECODE

    def decode(self, row: Row) -> None:
        self.running[row] = None

    def leave(self, rows: Iterable[Row]) -> None:
        for row in rows:
            del self.running[row]

    def drop(self, request: Request) -> list[PrefillJob]:
        """Remove a request in any phase. Returns the prefills that end."""
        request.phase = Phase.DONE
        gone = [job for job in self.waiting if job.request is request]
        self.waiting = [job for job in self.waiting if job.request is not request]
        self.leave([row for row in request.rows if row in self.running])
        return gone

    def retry(self, rows: Iterable[Row]) -> list[PrefillJob]:
        rows = list(rows)
        for row in rows:
            row.retry_alone = True
        return [self._again(row, admitted=True) for row in rows]

    def preempt(self, row: Row) -> PrefillJob:
        """Free a row's memory. The row continues from its committed tokens when it fits again."""
        row.gave_way = True
        return self._again(row, admitted=False)

    def _again(self, row: Row, *, admitted: bool) -> PrefillJob:
        self.leave([row])
        arrived = row.request.arrived
        # with fixed passes, the reply must come from decode passes, not from prompt passes
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
        """The plan of the next step. Read-only. `mixes`: chunks may share the pass of the decoding
        rows; `stalled`: seconds that these rows have waited for their token; `passes`: forward
        passes per token of each row."""
        sizes, rows = self.chunking, tuple(self.running)
        target = sizes.limits.stall_target
        alone = sizes.seconds(rows, passes=passes) if rows else 0.0
        ready = (job for job in self._in_order(now) if job.admitted and not job.restoring)
        job = next(ready, None)
        if job is None:
            return StepPlan(rows, pass_seconds=alone)
        if rows and self._itl_debt and (job.unembedded or not self._precedes(job)):
            return StepPlan(rows, pass_seconds=alone)
        if job.unembedded:
            most = sizes.fair(alone) - alone if rows else IDLE_SECONDS
            return StepPlan(rows, pass_seconds=alone, embedded=job, embedding_seconds=most)
        if job.scoring is not None:
            most = target if rows else IDLE_SECONDS
            return StepPlan(rows, pass_seconds=alone, scored=job, scoring_seconds=most)
        if job.own_pass:
            chunk = sizes.even_chunk(job)
            own = sizes.own_pass(job, chunk.size)
            return StepPlan(rows, chunk, pass_seconds=alone, chunk_seconds=own)
        brief = self._precedes(job)
        if rows and mixes and sizes.mixes and job.text_follows and not brief:
            chunk = sizes.chunk(job, rows, alone, mixed=True)
            return StepPlan(rows, chunk, mixed=True, pass_seconds=sizes.seconds(rows, chunk))
        chunk = sizes.chunk(job, rows, alone)
        own = sizes.own_pass(job, chunk.size)
        if rows and brief and stalled + own <= sizes.longest_gap:
            return StepPlan((), chunk, chunk_seconds=own)
        return StepPlan(rows, chunk, pass_seconds=alone, chunk_seconds=own)

    def ran(self, plan: StepPlan) -> None:
        """A step was launched. Steps without a chunk compensate for its time beyond the fair time,
        so that the average time of a token stays within that."""
        for row in plan.rows:
            self._shares.charge(row.request, OUTPUT_TOKEN)
        behind = plan.chunk_seconds + plan.scoring_seconds + plan.embedding_seconds
        took = plan.pass_seconds + behind
        alone = self.chunking.seconds(plan.rows) if plan.mixed else plan.pass_seconds
        fair = self.chunking.fair(alone) if plan.rows else 0.0
        self._itl_debt = max(0.0, self._itl_debt + took - fair) if self.running else 0.0

    def _in_order(self, now: float) -> Sequence[PrefillJob]:
        """Prompts in the queue or in prefill, the most urgent first, fair between accounts."""
        if len(self.waiting) < 2:
            return self.waiting
        return self._shares.ordered(sorted(self.waiting, key=partial(self._urgency, now)))

    def _urgency(self, now: float, job: PrefillJob) -> float:
        """A prompt in prefill does not age, so a new prompt never waits for all of it."""
        waited = job.aged if job.admitted else now - job.arrived
        return self.chunking.rest(job) - AGING * waited

    def _precedes(self, job: PrefillJob) -> bool:
        """Whether a prompt runs before the rows decode, within the time that these may wait. Brief
        prompts that arrive together are prefilled together. Their rows then decode in the same
        steps instead of twice as many."""
        return self.chunking.brief(job)

    # -- memory

    def overflowing(self) -> tuple[Row, bool] | None:
        """The row to preempt, and whether it can continue later. It is the youngest row, if the
        rows have outgrown the memory. Reclaims memory first. `None`: all rows fit."""
        budget = self.admission.budget
        limit = budget.available()
        if limit == self._fitting and not any(map(self.admission.exceeds, self.running)):
            return None
        need = self.live_bytes
        if need > self._settled:
            self._reclaim(need)
            limit = budget.available()
        if need > limit and self._give_back(self._live()):
            need, limit = self.live_bytes, budget.available()
        self._settled = need
        self._fitting = limit if need <= limit else None
        if need <= limit or not self.running:
            return None
        row = max(self.running, key=lambda row: (row.request.arrived, row.index))
        return row, self.admission.may_wait(row, self.active_rows)

    def displaced(self, now: float) -> Sequence[Row]:
        """Rows to preempt so that the first prompt of an account without rows can be admitted.
        Empty: no account has only prompts that wait, there is room, or this would not make
        enough."""
        if not self._shares.several:
            return ()
        present = {row.request.account for row in self._live()}
        absent = {j for j in self.waiting if j.request.account not in present and not j.restoring}
        if not absent or not present:
            return ()
        job = next(job for job in self._in_order(now) if job in absent)
        if self._make_room(job):
            return ()
        rows: list[Row] = []
        for row in above_share(self.running):
            rows.append(row)
            if self._make_room(job, rows):
                self._preempted_for = job
                return rows
        return ()

    def _reclaim(self, need: int) -> None:
        self.reclaimed = need
        self.admission.budget.reclaim(need)

    def _give_back(self, rows: Sequence[Row]) -> bool:
        """Free the capacity of rows that is only for later turns. Returns whether there was any."""
        spare = [row for row in rows if self.admission.spare(row)]
        for row in spare:
            self._trim(row, self.admission.kv_needed(row))
        return bool(spare)

    def reservation(self, rows: Iterable[Row]) -> int:
        return self.admission.reservation(rows)

    def _make_room(
        self, job: PrefillJob, without: Sequence[Row] = (), *, claims: bool = True
    ) -> bool:
        """Reclaim memory for a prompt beside the live rows, `without` some. Returns whether it
        fits. `claims`: what it will use of the prefix cache is no part of its need, and stays.
        Images are temporary, and may belong to the prompt itself, so they do not block a prompt
        that would run alone."""
        rows = [row for row in self._live() if row not in without]
        if len(rows) + len(job.rows) > self.admission.limits.max_rows:
            return False
        if claims:
            self._claim(job)
        need, images = self.reservation([*rows, *job.rows]), self.admission.budget.image_bytes()
        if not claims and rows and job.uses_prefix_cache:
            # a step more for it behind a prefix, and for the row that has the prefix now
            need += self.admission.budget.row_bytes(2 * STEP_TOKENS)
        self._reclaim(need + images)
        fits = self.admission.fits(need, images if rows else 0)
        if not fits and (spare := sum(map(self.admission.spare, rows))):
            fits = self.admission.fits(need - spare, images)
            if fits:
                self._give_back(rows)
        for row in job.rows:  # if it is admitted, it begins at once and holds more
            row.lease = None
        # behind a prefix, a row may take more than without it, which may be all that there is
        return fits or (claims and not rows and self._make_room(job, claims=False))

    # -- what is here

    @property
    def queued(self) -> int:
        return len(self._queued())

    def _queued(self) -> list[PrefillJob]:
        return [job for job in list(self.waiting) if not (job.admitted or job.request.ahead)]

    @property
    def active_rows(self) -> int:
        return len(self.running) + len(self._prefilling())

    @property
    def live_bytes(self) -> int:
        return self.reservation(self._live())

    def _live(self) -> list[Row]:
        return [*self._prefilling(), *self.running]

    def _prefilling(self) -> list[Row]:
        jobs = (job for job in self.waiting if job.admitted and not job.request.ahead)
        return [row for job in jobs for row in job.rows]

    @property
    def busy(self) -> bool:
        return bool(self.running) or any(not job.request.ahead for job in self.waiting)

    def fits_ahead(self, request: Request, stored: int) -> bool:
        """Whether the row of a prompt that will come fits in addition to `stored` bytes of
        prefixes."""
        return self.admission.fits(self.reservation(request.rows) + stored, 0)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def requests(self) -> list[Request]:
        found = dict.fromkeys([job.request for job in self.waiting])
        found |= dict.fromkeys([row.request for row in self.running])
        return sorted(found, key=lambda request: request.arrived)


def awaits(job: PrefillJob, others: Iterable[PrefillJob]) -> bool:
    """Whether `job` should wait, because a started prompt will store its prefix soon."""
    return any(provides(leader, job) for leader in others if leader.admitted)


def provides(leader: PrefillJob, job: PrefillJob) -> bool:
    """Whether `leader` will soon provide much of `job`'s prompt."""
    if leader is job or not leader.uses_prefix_cache or leader.request.salt != job.request.salt:
        return False
    if leader.ids is None or job.ids is None:
        return False
    shared = min(common(leader.ids, job.ids), len(leader.tokens), len(job.tokens) - 1)
    return shared - job.estimated_cached > WORTH_WAITING
