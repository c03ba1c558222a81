"""Which prompt is prefilled next, in what portion, and who is let in. Imports no mlx.

Rows that decode go first, but for brief prompts that fit into the stall target; the rest of a step
goes to one prompt at a time, the one with the least work left, aged so that a long prompt is never
starved. The portion is sized by measured times so that decoding rows stall no longer than the
target. Small portions of a long prompt ride: they share the pass of the rows where they may.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from ...errors import BadRequest, Overloaded
from ..request import Phase, Prefill, Request, Row
from .chunk_cost import ChunkTime
from .step_cost import StepTime

GRAIN = 4
"""Chunks are multiples of this many tokens: fewer shapes for the device."""
LEAST = 8
"""Tokens of the smallest chunk: fewer cost as much."""
IDLE_STALL = 0.5
"""Seconds of one chunk while nobody decodes: a cancel or a short prompt waits no longer."""
STALL_STEPS = 1.0
"""Decode steps that a chunk's own pass may last: streams keep half of their pace, unless more rows
wait than decode."""
RIDE_STEPS = 0.6
"""Decode steps that a chunk may add to the one it rides in: less, since it pays for no pass."""
BRIEF = 3.0
"""Stall targets within which a prompt is not cut finer than by the target: each portion pays the
fixed part, and others are delayed a few times at most."""
WORTHWHILE = 0.3
"""Least time of a chunk for its tokens, as a share of the fixed part."""
VARIED = 0.6
"""Share of the full size that every other chunk has, or its inverse for small ones: of equal ones
no line can be learnt."""
PAUSES = 8
"""Times that a chunk is held back for a step to be measured, which others may prevent."""
GROWTH = 2.0
"""Times the usual chunk that the next one may have: what is longer was not measured."""
TILE = 16
"""Rows of a pass with riders are a multiple: matrix kernels take as long for a part of a tile."""
RIDE_MOST = 128
"""Tokens of the largest chunk that rides: the output matrix is applied to each of them."""
OWN_PASS = 256
"""Tokens from which on a chunk is worth a pass of its own: several times what may ride."""
AGING = 0.1
"""A second of waiting weighs as much as this many seconds of prefill work."""
PATIENCE = 30.0
"""Seconds after which a prompt that does not fit keeps later ones from overtaking it."""


@dataclass(frozen=True)
class Limits:
    max_rows: int
    max_queue: int
    stall_target: float
    max_chunk: int
    output_reserve: int


@dataclass(frozen=True)
class Chunk:
    """Prefill tokens `start .. stop` of `work` in this step."""

    work: Prefill
    start: int
    stop: int
    rides: bool = False
    """In the pass of the rows that decode, not in one of its own."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a request needs, and bytes there are."""

    row_bytes: Callable[[int], int]
    """Cache bytes of one row of that many tokens."""
    available: Callable[[], int]
    """Bytes for live rows in all: what weights and the rows of other engines leave."""
    reclaim: Callable[[int], None]
    """Ask others (idle models, the prefix store) to go, so that live rows may hold this many."""
    alone: Callable[[], int]
    """Bytes for live rows if no other model were in memory."""
    others_go_on: Callable[[], bool] = lambda: False
    """Whether other engines hold memory that will come back without any of this one's."""
    beside: Callable[[], int] = lambda: 0
    """Bytes that requests hold for a while beside their rows: images on their way to the model."""


class Scheduler:
    """Queue, admission and order. `now` is monotonic seconds throughout."""

    def __init__(
        self,
        limits: Limits,
        budget: Budget,
        provides: Callable[[Prefill, Prefill], bool] = lambda leader, work: False,
        may_ride: Callable[[Prefill], bool] = lambda work: False,
    ) -> None:
        """`provides(leader, work)`: a prompt in prefill will soon spare `work` most of its own.

        `may_ride(work)`: its next tokens may share the pass of the rows that decode.
        """
        self.limits = limits
        self.provides = provides
        self.may_ride = may_ride
        self.budget = budget
        self.waiting: list[Prefill] = []
        self.running: list[Row] = []
        self.chunk_time = ChunkTime()
        self.step_time = StepTime()
        self._pauses = 0
        """Times in a row that a chunk was held back."""
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

    def submit(self, request: Request, now: float) -> Prefill:
        """Queue a request that passed `check`."""
        if not request.arrived:
            request.arrived = now
        # time spent before the queue (loading a model, say) gives no precedence in it
        work = Prefill(request, list(request.rows), request.prompt.tokens, arrived=now)
        self.waiting.append(work)
        return work

    def replay(self, rows: list[Row]) -> None:
        """Queue rows again whose caches a device failure has spoilt."""
        for row in rows:
            self.running.remove(row)
            row.suspect = True
            self.waiting.append(
                Prefill(
                    row.request, [row], row.all_tokens, arrived=row.request.arrived, started=True
                )
            )

    def preempt(self, row: Row) -> None:
        """Take a row's place in memory; it goes on from its committed tokens when it fits."""
        self.running.remove(row)
        self.waiting.append(
            Prefill(row.request, [row], row.all_tokens, arrived=row.request.arrived)
        )

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

    def drop(self, request: Request) -> None:
        """Forget a request wherever it is."""
        request.phase = Phase.DONE
        self.waiting = [w for w in self.waiting if w.request is not request]
        self.running = [r for r in self.running if r.request is not request]

    def leave(self, row: Row) -> None:
        """A row has ended; its request ends with its last row."""
        self.running.remove(row)
        if not row.request.unfinished:
            row.request.phase = Phase.DONE

    def join(self, work: Prefill) -> None:
        """The prompt is in the cache: its rows decode from now on."""
        self.waiting.remove(work)
        work.request.phase = Phase.DECODE
        self.running.extend(work.rows)

    # -- policy

    def next_chunk(self, now: float) -> Chunk | None:
        """What to prefill in this step; `None`: nothing waits, or nothing fits."""
        if not self.waiting:
            return None
        rows, held, patient = self.active_rows, self.live_bytes, False
        for work in sorted(self.waiting, key=lambda w: self._urgency(w, now)):
            if work.started:
                return self._next_of(work)
            if patient or any(self.provides(leader, work) for leader in self.waiting):
                continue
            if self._admit(work, rows, held):
                work.started = True
                work.request.phase = Phase.PREFILL
                return self.portion(work)
            # nobody new overtakes it any more; what has started must go on, or it never fits
            patient = now - work.arrived > PATIENCE
        return None

    def precedes(self, chunk: Chunk, stalled: float) -> bool:
        """Whether a chunk runs before rows decode that have waited for `stalled` seconds.

        Brief prompts that come together are prefilled together, as far as the target goes: their
        rows then decode in the same steps, and not in twice as many.
        """
        lasts = self.chunk_time(chunk.stop - chunk.start)
        return self._brief(chunk.work) and stalled + lasts <= self.limits.stall_target

    def portion(self, work: Prefill) -> Chunk:
        """The next tokens of a prompt that has started."""
        size = self._portion_size(work)
        size = max(LEAST, min(size, self.limits.max_chunk) // GRAIN * GRAIN)
        return Chunk(work, work.done, self._stop(work, size))

    def first(self, work: Prefill) -> Chunk:
        """The first tokens of a prompt that has its cache now: few, where the others will ride."""
        if self._rides(work):
            return Chunk(work, work.done, self._stop(work, LEAST))
        return self.portion(work)

    def measured(self, tokens: int, seconds: float) -> None:
        """Take a chunk's time into account."""
        if tokens >= GRAIN and seconds > 0:
            self.chunk_time.measured(tokens, seconds)

    def _urgency(self, work: Prefill, now: float) -> float:
        return work.cost * self.chunk_time.per_token - AGING * (now - work.arrived)

    def _next_of(self, work: Prefill) -> Chunk | None:
        """The next chunk of a prompt that has started; `None`: the step is to be measured."""
        if not self._rides(work):
            return self.portion(work)
        if not self.step_time.due:
            self._pauses = 0
        elif self._pauses < PAUSES:
            self._pauses += 1
            return None
        apart = self.portion(work)
        if apart.stop - apart.start >= OWN_PASS:
            return apart
        return Chunk(work, work.done, self._stop(work, self._ride_size()), rides=True)

    def _rides(self, work: Prefill) -> bool:
        return bool(self.running) and not self._brief(work) and self.may_ride(work)

    def _stop(self, work: Prefill, size: int) -> int:
        stop = min(work.done + size, len(work.tokens))
        cut = bisect_right(work.cuts, work.done)
        if cut < len(work.cuts):
            stop = min(stop, work.cuts[cut])
        return stop

    def _portion_size(self, work: Prefill) -> int:
        """Tokens of the next chunk of `work`, as far as time goes."""
        time, target = self.chunk_time, self.limits.stall_target
        if not self.running:
            return time.tokens(IDLE_STALL)
        if self._brief(work):
            return time.tokens(target)
        size = time.tokens(target)
        step = self.step_time.alone
        if step is not None:
            # no smaller than is worth the fixed part
            worthwhile = int(WORTHWHILE * time.fixed / time.per_token)
            steps = STALL_STEPS * max(1.0, self._pressing())
            size = min(size, max(time.tokens(steps * step), worthwhile))
        size = max(LEAST, min(size, int(GROWTH * time.usual) or size))
        if time.count % 2:
            size = int(VARIED * size if VARIED * size >= LEAST else size / VARIED)
        return size

    def _ride_size(self) -> int:
        """Tokens that ride in the next step, as far as time goes; whole tiles with the rows."""
        rows, step, each = len(self.running), self.step_time.alone, self.step_time.per_rider
        most = min(RIDE_MOST, self.limits.max_chunk)
        if step is None or each is None:
            most = LEAST
        elif each:
            longer = RIDE_STEPS * max(1.0, self._pressing()) * step
            most = min(most, int(min(longer, self.limits.stall_target) / each))
        fewest = -(-(rows + LEAST) // TILE) * TILE - rows
        return max(fewest, (rows + most) // TILE * TILE - rows)

    def _brief(self, work: Prefill) -> bool:
        """Whether all that has to be computed of a prompt takes little enough to be let through."""
        computed = self.chunk_time(len(work.tokens) - work.expected)
        return computed <= BRIEF * self.limits.stall_target

    def _pressing(self) -> float:
        """Rows that wait for each that decodes: few may be delayed for the sake of many."""
        return sum(len(work.rows) for work in self.waiting) / len(self.running)

    def _admit(self, work: Prefill, rows: int, held: int) -> bool:
        """Whether `work` fits beside so many active rows that hold so many bytes."""
        if rows + len(work.rows) > self.limits.max_rows:
            return False
        # images pass, so they keep nobody out who would run alone: they may be this prompt's own
        need, beside = held + self.reservation(work.rows), self.budget.beside()
        self.budget.reclaim(need + beside)
        return need + (beside if rows else 0) <= self.budget.available()

    # -- accounts

    @property
    def queued(self) -> int:
        """Requests that have not started."""
        return sum(not work.started for work in self.waiting)

    @property
    def active_rows(self) -> int:
        """Rows that decode or will, once their prompt is through."""
        return len(self.running) + sum(len(w.rows) for w in self.waiting if w.started)

    @property
    def live_bytes(self) -> int:
        """Bytes set aside for rows that decode or prefill."""
        started = [row for work in self.waiting if work.started for row in work.rows]
        return self.reservation([*started, *self.running])

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def requests(self) -> list[Request]:
        """Every request that has not ended, oldest first."""
        found = {id(w.request): w.request for w in self.waiting}
        found |= {id(r.request): r.request for r in self.running}
        return sorted(found.values(), key=lambda r: r.arrived)

    def reservation(self, rows: list[Row]) -> int:
        """Bytes to set aside for rows: what they hold and a reserve of output."""
        return sum(self.budget.row_bytes(self._tokens_reserved(row)) for row in rows)

    def _outgrown(self, row: Row) -> bool:
        """Whether a row needs more than was set aside for it when it was admitted."""
        return len(row.tokens) >= self.limits.output_reserve

    def _tokens_reserved(self, row: Row) -> int:
        reserve = min(row.request.max_tokens, self.limits.output_reserve)
        return max(len(row.request.prompt.tokens) + reserve, row.length + 1)
