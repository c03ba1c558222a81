"""How large the next chunk of a prompt is, and what passes take. Imports no mlx."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..fixed_shapes import FixedShapes
from ..request import PrefillJob, Row
from .admission import Limits
from .costs import Costs, Load
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

LONGEST_GAP = 0.75
"""Seconds that rows which decode wait at most, if smaller chunks lose much of the rate."""
IDLE_SECONDS = 0.5
"""Of one chunk while no row decodes, for which a cancel or a short prompt waits. A device whose
chunks of that time lose much of its rate takes larger ones."""
FAIR = 1.5
"""Times as long as without a prompt that a token may take on average, whatever the stall target: a
prompt has at least a third of the device."""
BRIEF_STALLS = 3.0
"""Stall targets within which a whole prompt may precede rows that decode."""
REST = 1024
"""Tokens of the passes by which the rest of a prompt is estimated."""
SCORED_TOKENS = 32
"""Of a pass at most that gives the logits of each: they take more memory than all else."""


@dataclass(frozen=True)
class Promise:
    """What streams and a prompt have of a device, by its curve; seconds of a token of a stream."""

    alone: float
    """Without the prompt,"""
    average: float
    """beside it,"""
    longest: float
    """and the longest."""
    share: float
    """Of its rate on an idle device that the prompt has."""


class Chunking:
    """Changes nothing but what `costs` learn."""

    def __init__(
        self, limits: Limits, costs: Costs, *, grid: int, fixed: FixedShapes | None
    ) -> None:
        """`grid`: passes of a prompt end at multiples of so many tokens, and at its cuts;
        `fixed`: what passes look like depends on no clock and no company."""
        self.limits = limits
        self.costs = costs
        self.grid = min(grid, limits.max_chunk)
        self.fixed = fixed
        self._as_measured = Costs(costs.curve)
        """At the pace at which the curve was measured, whatever happens later."""

    def chunk(
        self, job: PrefillJob, rows: Sequence[Row], alone: float = 0.0, *, mixed: bool = False
    ) -> Chunk:
        """The next tokens of a prompt, in the pass of the `rows` that decode, or in their own
        behind it. `alone`: what the pass of the rows takes without them."""
        sizes = self._sizes(job, len(rows) if mixed else 0)
        if not rows:
            own = partial(self.own_pass, job)
            longest = max(IDLE_SECONDS, own(worthwhile(sizes, own)))
            return _next(job, largest_size(sizes, own, longest))
        if self.brief(job) and not mixed:
            fitting = within(sizes, partial(self.own_pass, job), self.limits.stall_target)
            return _next(job, fitting[-1])
        keys = sum(row.held for row in rows)
        size = self._beside(sizes, len(rows), keys, job.done, alone, mixed=mixed)
        return _next(job, size)

    def _beside(
        self, sizes: Sequence[int], rows: int, keys: int, depth: int, alone: float, *, mixed: bool
    ) -> int:
        """The size of a chunk behind `depth` tokens, beside rows that hold `keys`."""

        def gap(size: int) -> float:
            if mixed:
                return self.costs.pass_of(rows, keys, size, depth)
            return alone + self.costs.pass_of(0, 0, size, depth)

        longest = max(self.limits.stall_target, LONGEST_GAP)
        return worthwhile(
            within(sizes, gap, longest), lambda size: self._with_repayment(gap(size), alone)
        )

    def _with_repayment(self, gap: float, alone: float) -> float:
        """Seconds of a step with a chunk and of the steps without one that repay it."""
        fair = self.fair(alone)
        return max(gap, fair * (gap - alone) / (fair - alone))

    def promise(self, streams: int, held: int, depth: int) -> Promise:
        """What the stall target gives streams of `held` tokens, and a prompt at `depth`."""
        alone = self.costs.pass_of(streams, streams * held)
        most = self.limits.max_chunk
        size = self._beside(
            widths(streams, most), streams, streams * held, depth, alone, mixed=True
        )
        pause = self.costs.pass_of(streams, streams * held, size, depth)
        idle = partial(self.costs.pass_of, 0, 0, depth=depth)
        best = largest_size(widths(0, most), idle, max(IDLE_SECONDS, idle(size)))
        cycle = self._with_repayment(pause, alone)
        share = size / cycle * idle(best) / best
        return Promise(alone, min(pause, self.fair(alone)), pause, share)

    def fair(self, alone: float) -> float:
        """Seconds that a token of rows which decode may take on average, beside a prompt. `alone`:
        what it takes without one."""
        return max(self.limits.stall_target, FAIR * alone)

    def even_chunk(self, job: PrefillJob) -> Chunk:
        """The next tokens, in a pass of their own: never more than rows that decode may wait for,
        and always the same, as what is computed depends on where passes end."""
        sizes = self._sizes(job, 0)
        few = [n for n in sizes if n <= SCORED_TOKENS] or sizes[:1]
        size = best_size(
            few if job.wants_prompt_logprobs else sizes,
            lambda size: self._as_measured.pass_of(0, 0, size, job.done),
            self.limits.stall_target,
        )
        return _next(job, size)

    def brief(self, job: PrefillJob) -> bool:
        """Whether rows that decode could wait for the whole prompt."""
        return self.own_pass(job, job.cost) <= BRIEF_STALLS * self.limits.stall_target

    def pays_mixed(self, chunk: Chunk, rows: Sequence[Row], alone: float) -> bool:
        """Whether a chunk takes less in the pass of the rows than in one of its own.

        It does, as the weights are read once, unless the rows spill over into one more tile.
        """
        count = len(rows)
        tiles = replace(chunk, stop=chunk.start + in_tiles(count + chunk.size) - count)
        return self.seconds(rows, tiles) <= alone + self.own_pass(chunk.job, in_tiles(chunk.size))

    def rest(self, job: PrefillJob) -> float:
        """Seconds of prefill until a prompt needs no more, at half of the depth that is left."""
        depth = len(job.tokens) - job.cost // 2
        return job.work * self.costs.pass_of(0, 0, REST, depth) / REST

    def own_pass(self, job: PrefillJob, tokens: int) -> float:
        """Seconds of a pass over the next tokens of a prompt alone."""
        return self.costs.pass_of(0, 0, tokens, max(job.done, len(job.tokens) - job.cost))

    def seconds(self, rows: Sequence[Row], chunk: Chunk | None = None, passes: int = 1) -> float:
        """Seconds of the passes of the rows that decode, and of a chunk that is mixed in."""
        load = self.load(rows, chunk)
        width = self.fixed.rows if self.fixed else -(-len(rows) // passes)
        return passes * self.costs.pass_of(width, load.keys // passes, load.chunk, load.depth)

    def load(self, rows: Sequence[Row], chunk: Chunk | None = None) -> Load:
        """What a pass of the rows that decode, and of a chunk, reads of their caches."""
        size, depth = (0, 0) if chunk is None else (chunk.size, chunk.start)
        return Load(sum(row.held for row in rows), size, depth)

    def wider(self, plan: StepPlan, tokens: int) -> float:
        """Seconds that a step's pass takes longer with so many tokens more, spread over its rows:
        tokens of one row attend to its cache together."""
        if not tokens:
            return 0.0
        chunk = plan.chunk.size if plan.chunk is not None and plan.mixed else 0
        width, costs = len(plan.rows) + chunk, self.costs
        least, most = in_tiles(width), in_tiles(width + tokens)
        per_key = costs.curve.per_key
        longer = per_key(1 + tokens / max(1, len(plan.rows))) - per_key(1)
        deeper = costs.pace * longer * self.load(plan.rows).keys
        return costs.pass_of(most, 0) - costs.pass_of(least, 0) + max(0.0, deeper)

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


def _next(job: PrefillJob, tokens: int) -> Chunk:
    return Chunk(job, job.done, job.done + tokens)
