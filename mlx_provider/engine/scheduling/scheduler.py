"""Who is let in, which prompt is prefilled next and in what portion. Imports no mlx.

A step asks twice: `admit` lets one prompt in, `plan` says what runs, and changes nothing. Rows that
decode do so in every step, but for brief prompts that may precede them. One prompt at a time is
prefilled, the one with the least work left, aged so that a long prompt is never starved; its chunk
is mixed into the pass of the rows where it may be, and as large as the stall target allows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from ...errors import BadRequest, Overloaded
from ..fixed_shapes import FixedShapes
from ..request import Phase, PrefillJob, Request, Row
from ..room import grown, growth
from .costs import Costs
from .plan import (
    Chunk,
    StepPlan,
    best_size,
    grid_sizes,
    in_tiles,
    largest_size,
    widths,
    within,
    worthwhile,
)
from .shared_prefix import awaits

IDLE_STALL = 0.5
"""Seconds of one chunk while nobody decodes, for which a cancel or a short prompt waits. A device
whose chunks of that time lose much of its rate takes larger ones."""
BRIEF = 3.0
"""Stall targets within which a whole prompt may precede rows that decode."""
AGING = 0.1
"""A second of waiting weighs as much as this many seconds of prefill work."""
SCORED = 32
"""Tokens of a pass at most that gives the logits of each: they take more memory than all else."""
PATIENCE = 30.0
"""Seconds after which a prompt that does not fit keeps later ones from overtaking it."""


@dataclass(frozen=True)
class Limits:
    max_rows: int
    max_queue: int
    stall_target: float
    """Seconds that rows which decode should not wait longer for their next token."""
    max_chunk: int
    output_reserve: int


@dataclass(frozen=True)
class Budget:
    """Bytes that a request needs, and bytes there are."""

    row_bytes: Callable[[int], int]
    """Cache bytes of one row of that many tokens."""
    available: Callable[[], int]
    """Bytes for live rows in all: what weights and the rows of other engines leave."""
    reclaim: Callable[[int], None]
    """Ask others (idle models, the prefix cache) to go, so that live rows may hold this many."""
    alone: Callable[[], int]
    """Bytes for live rows if no other model were in memory."""
    others_go_on: Callable[[], bool] = lambda: False
    """Whether other engines hold memory that will come back without any of this one's."""
    beside: Callable[[], int] = lambda: 0
    """Bytes that requests hold for a while beside their rows: images on their way to the model."""
    passing: Callable[[int, int], int] = lambda tokens, rows: 0
    """Bytes of a pass while it runs: of so many rows, and of a prompt of so many tokens."""


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
        """`grid`: passes of a prompt end at multiples of so many tokens, and at its cuts;
        `fixed`: what passes look like depends on no clock and no company."""
        self.limits = limits
        self.grid = min(grid, limits.max_chunk)
        self.fixed = fixed
        self.budget = budget
        self.costs = costs or Costs()
        self._as_measured = Costs(self.costs.curve)
        """At the pace at which the curve was measured, whatever happens later."""
        self.waiting: list[PrefillJob] = []
        """Prompts that are queued or in prefill."""
        self.running: dict[Row, None] = {}
        """The rows that decode, in the order in which they joined: nobody else keeps a list."""
        self._settled = 0
        """Bytes of live rows for which memory was last made."""
        self._fitting: int | None = None
        """The limit within which all rows were last found; they stay so until one outgrows what
        was set aside for it."""

    # -- coming and going

    def check(self, request: Request, arriving: int = 0) -> None:
        """Whether a request may queue; reads only, so any thread may ask.

        `arriving`: requests that were let in but are not queued yet. Raises `Overloaded` when
        the queue is full, `BadRequest` when the request can never fit.
        """
        if not 0 < len(request.rows) <= self.limits.max_rows:
            raise BadRequest(
                f"n={len(request.rows)} is not within 1 .. {self.limits.max_rows} rows", param="n"
            )
        queued = self.queued + arriving
        if queued >= self.limits.max_queue:
            raise Overloaded(f"{queued} requests are waiting, the limit; try again later")
        need, limit = self.reservation(request.rows), self.budget.alone()
        if need > limit:
            raise BadRequest(
                f"the prompt ({len(request.prompt.tokens)} tokens) needs {need} bytes of cache; "
                f"the memory limit leaves {max(0, limit)} beside the model alone: shorten it, or "
                "raise MLX_PROVIDER_MEMORY_LIMIT"
            )

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

        Makes room for it, and sets memory aside for its rows. `None`: nobody is let in.
        """
        for job in self._by_urgency(now):
            if job.admitted:
                return None
            if awaits(job, self.waiting):
                continue
            if self._fits(job):
                return self.let_in(job)
            if now - job.arrived > PATIENCE:
                # nobody new overtakes it any more; what was let in must go on, or it never fits
                return None
        return None

    def let_in(self, job: PrefillJob | None) -> PrefillJob | None:
        """Memory is set aside for a prompt."""
        if job is not None:
            job.admitted = True
            job.request.phase = Phase.PREFILL
        return job

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
        tokens = row.request.prompt.tokens if self.fixed else row.all_tokens
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
        rows = tuple(self.running)
        alone = self._seconds(passes=passes) if rows else 0.0
        job = next((job for job in self._by_urgency(now) if job.admitted), None)
        if job is None:
            return StepPlan(rows, pass_seconds=alone)
        if job.scoring is not None:
            most = self.limits.stall_target if rows else IDLE_STALL
            return StepPlan(rows, pass_seconds=alone, scored=job, scoring_seconds=most)
        if job.apart:
            chunk = self._even_chunk(job)
            apart = self._apart(job, chunk.size)
            return StepPlan(rows, chunk, pass_seconds=alone, chunk_seconds=apart)
        if rows and mixes and job.text_follows:
            chunk = self._chunk(job, rows)
            if self._pays_together(chunk, alone):
                return StepPlan(rows, chunk, mixed=True, pass_seconds=self._seconds(chunk))
        chunk = self._chunk(job, beside=alone)
        apart = self._apart(job, chunk.size)
        if rows and self._precedes(job) and stalled + apart <= self.limits.stall_target:
            return StepPlan((), chunk, chunk_seconds=apart)
        return StepPlan(rows, chunk, pass_seconds=alone, chunk_seconds=apart)

    def _pays_together(self, chunk: Chunk, alone: float) -> bool:
        """Whether a chunk takes less in the pass of the rows than in one of its own.

        It does, as the weights are read once, unless the rows spill over into one more tile.
        """
        rows = len(self.running)
        tiles = replace(chunk, stop=chunk.start + in_tiles(rows + chunk.size) - rows)
        return self._seconds(tiles) <= alone + self._apart(chunk.job, in_tiles(chunk.size))

    def _by_urgency(self, now: float) -> list[PrefillJob]:
        if len(self.waiting) < 2:
            return self.waiting
        each = self.costs.pass_of(0, 0, 1024) / 1024
        return sorted(self.waiting, key=lambda job: job.work * each - AGING * (now - job.arrived))

    def _precedes(self, job: PrefillJob) -> bool:
        """Whether a prompt goes before rows decode, as long as those wait no longer than they may.

        Brief prompts that come together are prefilled together: their rows then decode in the
        same steps, and not in twice as many.
        """
        return self._brief(job)

    def _brief(self, job: PrefillJob) -> bool:
        return self._apart(job, job.cost) <= BRIEF * self.limits.stall_target

    def _chunk(
        self, job: PrefillJob, mixed_with: tuple[Row, ...] = (), beside: float = 0.0
    ) -> Chunk:
        """The next tokens of a prompt, in the pass of the rows, or in their own `beside` that."""
        sizes = self._sizes(job, len(mixed_with))
        if not self.running:
            longest = max(IDLE_STALL, self._apart(job, worthwhile(sizes, self.costs.curve.seconds)))
            size = largest_size(sizes, partial(self._apart, job), longest)
            return Chunk(job, job.done, job.done + size)
        if self._brief(job) and not mixed_with:
            size = within(sizes, partial(self._apart, job), self.limits.stall_target)[-1]
            return Chunk(job, job.done, job.done + size)
        keys = sum(row.held for row in mixed_with)

        def seconds(size: int) -> float:
            return beside + self.costs.pass_of(len(mixed_with), keys, size, job.done)

        size = best_size(sizes, seconds, self.limits.stall_target)
        return Chunk(job, job.done, job.done + size)

    def _even_chunk(self, job: PrefillJob) -> Chunk:
        """The next tokens, in a pass of their own: never more than rows that decode may wait for,
        and always the same, as what is computed depends on where passes end."""
        sizes = self._sizes(job, 0)
        few = [n for n in sizes if n <= SCORED] or sizes[:1]
        size = best_size(
            few if job.tells_prompt else sizes,
            lambda size: self._as_measured.pass_of(0, 0, size, job.done),
            self.limits.stall_target,
        )
        return Chunk(job, job.done, job.done + size)

    def _sizes(self, job: PrefillJob, rows: int) -> list[int]:
        """Tokens that the next chunk may have, ascending."""
        if self.fixed:
            return [self.fixed.size(job.done, len(job.tokens))]
        cut, total = bisect_right(job.cuts, job.done), len(job.tokens)
        end = job.cuts[cut] if cut < len(job.cuts) else total
        if self.grid > 1:
            return grid_sizes(job.done, end, total, self.grid, self.limits.max_chunk)
        left = end - job.done
        most = min(left, self.limits.max_chunk)
        sizes = widths(rows, most)
        return sizes if sizes and (sizes[-1] == most or most < left) else [*sizes, most]

    def _apart(self, job: PrefillJob, tokens: int) -> float:
        """Seconds of a pass over the next tokens of a prompt alone."""
        return self.costs.pass_of(0, 0, tokens, max(job.done, len(job.tokens) - job.cost))

    def _seconds(self, chunk: Chunk | None = None, passes: int = 1) -> float:
        """Seconds of the passes of the rows that decode, and of a chunk that is mixed in."""
        keys = sum(row.held for row in self.running)
        size, depth = (0, 0) if chunk is None else (chunk.size, chunk.start)
        rows = self.fixed.rows if self.fixed else -(-len(self.running) // passes)
        return passes * self.costs.pass_of(rows, keys // passes, size, depth)

    def wider(self, plan: StepPlan, tokens: int) -> float:
        """Seconds that a step's pass takes longer with so many tokens more, beside few keys."""
        chunk = plan.chunk.size if plan.chunk is not None and plan.mixed else 0
        width = len(plan.rows) + chunk
        least, most = in_tiles(width), in_tiles(width + tokens)
        return self.costs.pass_of(most, 0) - self.costs.pass_of(least, 0)

    # -- memory

    def overflowing(self) -> Row | None:
        """The row to preempt: the youngest, once rows have outgrown what there is.

        Asks others for their memory first. `None`: all fits.
        """
        limit = self.budget.available()
        if limit == self._fitting and not any(map(self._outgrown, self.running)):
            return None
        need = self.live_bytes
        if need > self._settled:
            self.budget.reclaim(need)
            limit = self.budget.available()
        self._settled = need
        self._fitting = limit if need <= limit else None
        if need <= limit or not self.running:
            return None
        return max(self.running, key=lambda row: (row.request.arrived, row.index))

    def may_wait(self, row: Row) -> bool:
        """Whether a row that has outgrown the memory can go on later."""
        if self.reservation([row]) > self.budget.alone():
            return False
        return self.active_rows > 1 or self.budget.others_go_on()

    def reservation(self, rows: Iterable[Row]) -> int:
        """Bytes to set aside for rows: what they hold, a reserve of output, and their passes."""
        rows = list(rows)
        if not rows:
            return 0
        held = sum(self.budget.row_bytes(self._tokens_reserved(row)) for row in rows)
        return held + self.budget.passing(max(map(self._tokens_to_run, rows)), len(rows))

    def room(self, job: PrefillJob) -> int:
        """Tokens for which a cache of its rows is to have room."""
        return max(map(self._tokens_reserved, job.rows))

    def growth(self, job: PrefillJob) -> int:
        """Tokens by which a row grows once it has outgrown that."""
        return growth(*self._first_room(job.request))

    def _fits(self, job: PrefillJob) -> bool:
        """Whether a prompt fits beside those that were let in, once others have made room."""
        rows = self.active_rows
        if rows + len(job.rows) > self.limits.max_rows:
            return False
        # images pass, so they keep nobody out who would run alone: they may be this prompt's own
        need, beside = self.reservation([*self._live(), *job.rows]), self.budget.beside()
        self.budget.reclaim(need + beside)
        return need + (beside if rows else 0) <= self.budget.available()

    def _outgrown(self, row: Row) -> bool:
        """Whether a row needs more than was set aside for it when it was admitted."""
        return len(row.tokens) >= self.limits.output_reserve

    def _tokens_to_run(self, row: Row) -> int:
        """Tokens of a row that are a prompt, or may become one again."""
        whole = row.held if self._outgrown(row) else len(row.request.prompt.tokens)
        return min(row.held, whole)

    def _tokens_reserved(self, row: Row) -> int:
        first, longest = self._first_room(row.request)
        return grown(first, longest, row.held + 1)

    def _first_room(self, request: Request) -> tuple[int, int]:
        """Tokens for which its rows get room at first, and those that they can come to at most."""
        prompt, most = len(request.prompt.tokens) - request.skipped, request.max_tokens
        return prompt + min(most, self.limits.output_reserve), prompt + most

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
