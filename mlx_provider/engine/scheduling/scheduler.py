"""The queue, the rows that decode, and the decisions of a step. Imports no mlx.

`schedule` decides a step with numbers and changes nothing, by the rules in docs/architecture.md
(Scheduling). `apply` reclaims memory for its record and admits prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ...errors import BadRequest, Overloaded
from ..request import Phase, PrefillJob, Request, Row
from .chunking import IDLE_SECONDS, Chunking, FixedShapes
from .costs import Costs
from .ledger import Ledger, MemoryCheck, PrefixOffers
from .step import Chunk, StepBuilder, StepPlan, StepRecord, prefilling

OUTPUT_TOKEN = 2.0
"""A token of a reply counts as this many of a prompt, as in VTC."""
AGING = 0.1
"""One second of waiting counts as this many seconds of prefill work."""
OTHER_TENANTS = 0.25
"""Places in the queue for tenants without a request in it, as a share of the others."""


class Scheduler:
    """Queue, admission and order. `now` is in monotonic seconds."""

    def __init__(
        self,
        ledger: Ledger,
        costs: Costs | None = None,
        *,
        grid: int = 1,
        fixed: FixedShapes | None = None,
        prefixes: PrefixOffers | None = None,
    ) -> None:
        """`grid`, `fixed`: see `Chunking`. `prefixes`: of the prefix cache, if there is one."""
        self.ledger = ledger
        self.prefixes = prefixes or PrefixOffers()
        self.chunking = Chunking(ledger.limits, costs or Costs(), grid=grid, fixed=fixed)
        self.costs = self.chunking.costs
        self.waiting: list[PrefillJob] = []
        """Prompts in the queue or in prefill (`admitted`), until their rows decode."""
        self.running: dict[Row, None] = {}
        """The rows that decode, in the order in which they joined. This is the only such list."""
        self.shares = FairShares()
        self.memory_check = MemoryCheck()
        # `charge_step` sets both
        self._decoded = False
        """Whether rows have decoded in the last step, after which they may need more memory."""
        self._stall_debt = 0.0
        """Seconds that decoding rows have waited for chunks beyond their fair time."""

    def schedule(
        self, now: float, *, mixes: bool = False, stalled: float = 0.0, passes: int = 1
    ) -> StepRecord:
        """Decide the next step. Changes nothing. `mixes`: chunks may share the pass of the
        decoding rows; `stalled`: seconds that these rows have waited for their token; `passes`:
        those in which the rows decode."""
        late = [r for r in self.requests() if r.deadline is not None and now > r.deadline]
        record = StepRecord(now, sorted(late, key=lambda request: request.arrived))
        step = StepBuilder(self, record)  # its methods also fill the record
        if self._decoded:
            step.fit_rows()
        if not record.to_preempt:  # else these rows are considered first, in the next record
            # rows of tenants with several may give way to a tenant without any
            record.to_admit = step.choose_admission(first=step.displace())
        record.to_look_up = [*step.memory.offers]  # its keys are the prompts tried
        started = [job for job in step.jobs if job.admitted or job is record.to_admit]
        record.to_begin = [job for job in started if job.cache is None and not job.restoring]
        if record.to_begin:  # the passes are in the next record
            return record
        rows, mixes = tuple(step.rows), mixes and self.costs.curve.mixing > 0
        rows_seconds = self.chunking.seconds(rows, passes=passes)
        record.plan = StepPlan(rows, pass_seconds=rows_seconds, passes=passes)
        # its chunk, or nothing if rows have waited too long; if it is brief, rows may wait for it
        if (job := next((job for job in started if not job.restoring), None)) is not None:
            record.plan = self._add_prompt(record.plan, job, mixes, stalled)
        return record

    def in_order(self, now: float, jobs: Sequence[PrefillJob]) -> Sequence[PrefillJob]:
        """Prompts in the queue or in prefill, the most urgent first, fair between tenants."""
        return self.shares.order(sorted(jobs, key=partial(self._urgency, now))) if jobs else ()

    def _urgency(self, now: float, job: PrefillJob) -> float:
        """Seconds that the rest of its prefill takes, less for its waiting. A prompt in prefill
        waits only while others run, so a new prompt never waits for all of it."""
        waited = job.waited_seconds if job.admitted else now - job.request.queued
        return self.chunking.rest(job) - AGING * waited

    def apply(self, record: StepRecord) -> None:
        """Reclaim memory and admit a prompt, once requests have ended and rows are preempted."""
        if record.memory_check is not None:
            self.memory_check = record.memory_check
        if record.to_reclaim:
            self.ledger.reclaim(record.to_reclaim)
        if (job := record.to_admit) is not None and job in self.waiting:
            job.waited_seconds = record.now - job.request.queued
            job.admitted, job.request.phase = True, Phase.PREFILL

    # -- the prompt of a step, and what is left of a plan

    def _add_prompt(self, plan: StepPlan, job: PrefillJob, mixes: bool, stalled: float) -> StepPlan:
        """Add nothing while rows have waited too long; else the work before its chunks (scoring or
        images), or its chunk: in the rows' pass, in its own pass behind them, or in its own pass
        while they wait, if it is brief."""
        chunking, rows, rows_seconds = self.chunking, plan.rows, plan.pass_seconds
        # it may run before the rows, so that brief prompts which come together decode together
        may_precede = chunking.is_brief(job)
        if rows and self._stall_debt and (job.spans_to_embed or not may_precede):
            return plan  # rows decode alone until they have waited no longer than is fair
        if job.spans_to_embed or job.scoring is not None:
            share = chunking.fair(rows_seconds) - rows_seconds
            limit = share if job.spans_to_embed else chunking.limits.stall_target
            return replace(plan, prepared=job, preparing_seconds=limit if rows else IDLE_SECONDS)
        mixed = bool(rows) and mixes and job.text_follows and not (may_precede or job.own_pass)
        if job.own_pass:
            size = chunking.own_size(job)
        else:
            size = chunking.size(job, rows, rows_seconds, mixed=mixed)
        chunk = Chunk(job, job.computed_tokens, job.computed_tokens + size)
        if mixed:
            return StepPlan(rows, chunk, mixed=True, pass_seconds=chunking.seconds(rows, chunk))
        plan = replace(plan, chunk=chunk, chunk_seconds=chunking.duration(job, size))
        in_time = stalled + plan.chunk_seconds <= chunking.longest_gap
        precedes = rows and may_precede and in_time and not job.own_pass
        # if it precedes, rows wait for this step, and decode with the new ones in the next
        return replace(plan, rows=(), pass_seconds=0.0) if precedes else plan

    def remaining_plan(self, plan: StepPlan, *, keep_mixed: bool = True) -> StepPlan:
        """The plan without rows and prompts that ended since it was made, and without a chunk whose
        prompt does not stand where the plan expected it. A mixed chunk without rows has its own
        pass. `keep_mixed`: whether a mixed chunk can run. Not if the last pass has failed."""
        rows, planned = tuple(row for row in plan.rows if row in self.running), plan
        if plan.prepared is not None and plan.prepared.cache is None:
            plan = replace(plan, prepared=None, preparing_seconds=0.0)
        if plan.chunk is not None and not (plan.chunk.due and (keep_mixed or not plan.mixed)):
            plan = replace(plan, chunk=None, mixed=False, chunk_seconds=0.0)
        if plan.mixed and plan.chunk is not None and not rows:
            seconds = self.chunking.duration(plan.chunk.job, plan.chunk.size)
            plan = replace(plan, mixed=False, chunk_seconds=seconds)
        if len(rows) == len(planned.rows) and plan.mixed == planned.mixed:
            return plan  # the pass of the rows is the same
        chunk, passes = plan.chunk if plan.mixed else None, min(plan.passes, len(rows) or 1)
        return replace(plan, rows=rows, pass_seconds=self.chunking.seconds(rows, chunk, passes))

    def charge_step(self, plan: StepPlan) -> None:
        """A step begins. Steps without a chunk compensate for its time beyond the fair time, so
        that the average time of a token stays within that. An empty plan, of a record in which
        prompts begin, charges nothing."""
        self._decoded = bool(plan.rows)
        took = plan.pass_seconds + plan.chunk_seconds + plan.preparing_seconds
        rows_seconds = self.chunking.seconds(plan.rows) if plan.mixed else plan.pass_seconds
        fair = self.chunking.fair(rows_seconds) if plan.rows else 0.0
        self._stall_debt = max(0.0, self._stall_debt + took - fair) if self.running else 0.0

    def charge_token(self, request: Request) -> None:
        self.shares.charge(request, OUTPUT_TOKEN)

    def charge_chunk(self, chunk: Chunk) -> None:
        if not chunk.job.request.background:
            self.shares.charge(chunk.job.request, chunk.size)
        self._delay_others(chunk.job, self.costs.pass_of(0, 0, chunk.size, chunk.start))

    def charge_preparation(self, plan: StepPlan, seconds: float) -> None:
        """The vision tower or the scorer has run for these seconds. Other prompts in prefill have
        waited as long, and decoding rows for the time beyond the plan."""
        self._delay_others(plan.prepared, seconds)
        self._stall_debt += max(0.0, seconds - plan.preparing_seconds) if self.running else 0.0

    def _delay_others(self, own: PrefillJob | None, seconds: float) -> None:
        for job in self.waiting:
            if job.admitted and job is not own:
                job.waited_seconds += seconds

    # -- coming and going

    def check(self, request: Request, arriving: Sequence[str] = ()) -> None:
        """Check whether a request may queue. Read-only, so any thread may call it. `arriving`: the
        tenants of accepted requests that are not queued yet. Raises `Overloaded` if the queue is
        full, which has more places for the first request of a tenant, and `BadRequest` if the
        request can never fit."""
        limits, ledger, n = self.ledger.limits, self.ledger, len(request.rows)
        if not 0 < n <= limits.max_rows:
            raise BadRequest(f"n={n} is not within 1 .. {limits.max_rows} rows", param="n")
        queued = [*(job.request.tenant for job in self.queued_jobs), *arriving]
        first = request.tenant not in queued
        if len(queued) >= limits.max_queue * (1 + OTHER_TENANTS * first):
            raise Overloaded(f"{len(queued)} requests are waiting, the limit; try again later")
        tokens = len(request.prompt.tokens)
        # a prompt with log-probabilities uses no prefix cache, so its rows share nothing
        saved = 0 if request.echoed else self.prefixes.fork_bytes(tokens, n)
        need = ledger.reservation(request.rows) - saved
        if need > (limit := ledger.available_alone()):
            raise BadRequest(
                f"the prompt ({tokens} tokens) needs {need} bytes of cache; "
                f"the memory limit leaves {max(0, limit)} beside the model alone: shorten it, or "
                "raise MLX_PROVIDER_MEMORY_LIMIT"
            )

    def submit(self, request: Request, now: float) -> PrefillJob:
        request.arrived = request.arrived or now
        request.queued = now
        self.shares.join(request, self.requests())
        tokens = request.prompt.tokens if request.inputs is None else request.inputs.tokens[0]
        job = PrefillJob(request, list(request.rows), tokens)
        self.waiting.append(job)
        return job

    def end_prefill(self, job: PrefillJob) -> None:
        self.waiting.remove(job)
        job.request.phase = Phase.DECODE

    def add_row(self, row: Row) -> None:
        self.running[row] = None

    def remove_rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            del self.running[row]

    def remove_request(self, request: Request) -> list[PrefillJob]:
        """Remove a request in any phase. Returns the prefills that end."""
        request.phase = Phase.DONE
        gone = [job for job in self.waiting if job.request is request]
        self.waiting = [job for job in self.waiting if job.request is not request]
        self.remove_rows([row for row in request.rows if row in self.running])
        return gone

    def retry_rows(self, rows: Sequence[Row]) -> list[PrefillJob]:
        for row in rows:
            row.retry_alone, row.corrupted = True, False
        return [self._requeue(row, admitted=True) for row in rows]

    def preempt_row(self, row: Row) -> PrefillJob:
        """Free a row's memory. The row continues from its committed tokens when it fits again."""
        row.gave_way = True
        return self._requeue(row, admitted=False)

    def _requeue(self, row: Row, *, admitted: bool) -> PrefillJob:
        self.remove_rows([row])
        # with fixed passes, a reply must come from decode passes, so its tokens are replayed
        tokens = row.request.prompt.tokens if self.chunking.fixed else row.all_tokens
        job = PrefillJob(row.request, [row], tokens, admitted)
        if row.request.selected is not None:
            job.thin_out(row.request.selected)
        begun = admitted or any(other in self.running for other in row.request.rows)
        row.request.phase = Phase.PREFILL if begun else Phase.WAITING
        self.waiting.append(job)
        return job

    # -- counts

    @property
    def queued_jobs(self) -> list[PrefillJob]:
        return [job for job in list(self.waiting) if not (job.admitted or job.request.background)]

    @property
    def active_rows(self) -> int:
        return len(self.running) + len(prefilling(self.waiting))

    @property
    def live_bytes(self) -> int:
        return self.ledger.reservation([*prefilling(self.waiting), *self.running])

    @property
    def busy(self) -> bool:
        return bool(self.running) or any(not job.request.background for job in self.waiting)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def fits_background(self, request: Request, stored: int) -> bool:
        """Whether the row of a background prefill fits beside `stored` bytes of prefixes."""
        return self.ledger.reservation(request.rows) + stored <= self.ledger.available()

    def requests(self) -> Collection[Request]:
        waiting = [job.request for job in self.waiting]
        return dict.fromkeys([*waiting, *(row.request for row in self.running)])


class FairShares:
    """The tokens that each tenant was served, divided by its share, as in VTC (Sheng et al., OSDI
    2024). Unlike there, a tenant without requests is forgotten, and starts again at the smallest
    count. Prompts run in the order of the counts at which they would end: a short prompt precedes a
    long one, and at most as many tokens of another tenant run before a prompt as that has."""

    def __init__(self) -> None:
        self._served = defaultdict[str, float](float)

    def join(self, request: Request, present: Iterable[Request]) -> None:
        served = {other.tenant: self._served[other.tenant] for other in present}
        served.setdefault(request.tenant, min(served.values(), default=0.0))
        self._served = defaultdict(float, served)

    def charge(self, request: Request, tokens: float) -> None:
        self._served[request.tenant] += tokens / request.share

    def order(self, jobs: Sequence[PrefillJob]) -> Sequence[PrefillJob]:
        """Prompts in the order in which they run. Those of one tenant keep their order."""
        ends, tags = self._served.copy(), dict[PrefillJob, float]()
        for job in jobs:
            ends[job.request.tenant] += job.request_tokens_left / job.request.share
            tags[job] = ends[job.request.tenant]
        return sorted(jobs, key=tags.__getitem__)
