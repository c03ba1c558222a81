"""Chooses the size of the next chunk, and estimates the time and memory of passes. Without mlx."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from typing import Self

from ..request import PrefillJob, Row
from .costs import Costs, Curve, Load
from .ledger import Limits
from .step import Chunk, StepPlan

LONGEST_GAP = 0.75
"""Longest wait of decoding rows in seconds, used if smaller chunks lose much of the rate."""
IDLE_SECONDS = 0.5
"""Seconds of a chunk while no row decodes. A cancellation or a short prompt waits for it. A device
that loses much of its rate with such chunks uses larger ones."""
FAIR = 1.5
"""A token may take on average this multiple of its time without a prompt, whatever the stall
target. So a prompt gets at least a third of the device."""
WIDE = 256
"""Smaller chunks are hardly faster on a GPU. They run only if this exceeds the longest gap."""
BRIEF = 1024
"""A prompt of at most so many tokens runs before rows decode, if that keeps the longest gap."""
SLACK = 1.5
"""A step with a chunk may take this multiple of the stall target. If the smallest wide chunk takes
longer, the step may take as long as the longest gap."""
REST = 1024
"""Pass size, in tokens, for the estimate of the rest of a prompt."""
SCORED_TOKENS = 32
"""Most tokens of a pass that returns the logits of each token, which need the most memory."""
SMALLEST = 16
"""Passes of a prompt end at multiples of this, of twice as many tokens, and so on. So there are few
shapes: a GPU may have to plan or compile each one."""
NEARLY = 0.9
"""A smaller chunk with this share of the best rate is good enough."""
LITTLE_MORE = 1.5
"""A larger chunk may take this multiple of the time of the smallest, whatever the target. With one
token per reading of the weights, a long prompt would take hours."""
GRID = 32
"""Passes of a prompt with recurrent state end at multiples of this. The kernels compute such states
in blocks, of which this is a multiple, and round differently if blocks begin elsewhere."""
TAIL = 32
"""Least tokens of the last such pass, because kernels for fewer round differently, too."""
ROWS = 8
"""Rows of a decode pass of a reproducible model: they take little longer than one on a GPU."""
TOKENS = 256
"""Tokens of its prompt passes: enough for the best rate of most devices. Stored prefixes are cut to
a multiple of it, and other requests wait for one such pass."""


@dataclass(frozen=True)
class FixedShapes:
    """Pass shapes of a reproducible model, independent of other requests.

    The shapes of arrays choose the kernels, and each kernel rounds differently. So each decode pass
    has `rows` rows, some for padding, each with keys of its own. Each prompt pass but the last has
    `tokens` tokens, from the beginning on, so that a stored prefix equals a computed one."""

    rows: int
    tokens: int

    @classmethod
    def within(cls, max_rows: int, max_chunk: int) -> Self:
        """The usual shapes, or smaller ones if these exceed the limits."""
        return cls(min(ROWS, max_rows), min(TOKENS, max_chunk))

    def whole(self, tokens: int) -> int:
        """Tokens among the first `tokens` that whole passes have computed."""
        return tokens // self.tokens * self.tokens

    def size(self, done: int, total: int) -> int:
        """Tokens of the pass after the first `done` tokens of a prompt."""
        return min(self.whole(done) + self.tokens, total) - done


class Chunking:
    """Chooses chunks and estimates passes. Has no state except the measurements in `costs`."""

    def __init__(
        self, limits: Limits, costs: Costs, *, grid: int, fixed: FixedShapes | None
    ) -> None:
        """`grid`: prompt passes end at multiples of this, and at the cuts of the prompt. `fixed`:
        the shapes of all passes; `None`: they are chosen by time."""
        self.limits = limits
        self.costs = costs
        self.grid = min(grid, limits.max_chunk)
        self.fixed = fixed
        self._as_measured = Costs(costs.curve)  # later passes do not change them

    def size(
        self, job: PrefillJob, rows: Sequence[Row], rows_seconds: float = 0, *, mixed: bool = False
    ) -> int:
        """Tokens of the next chunk of a prompt, in the pass of the decoding `rows` (`mixed`) or
        behind it. `rows_seconds`: seconds of the rows' pass without the chunk."""
        sizes: Sequence[int] = self._sizes(job)
        own = partial(self.duration, job)
        if job.request.background:
            return within(sizes, own, self.limits.stall_target)[-1]
        if not rows:
            sizes = self._wide(sizes, own)
            longest = max(IDLE_SECONDS, own(worthwhile(sizes, own)))
            return _nearly_best([n for n in sizes if own(n) <= longest], own)[-1]
        if self.is_brief(job):
            return sizes[-1]
        keys, fair = sum(row.length_to_cache for row in rows), self.fair(rows_seconds)

        def gap(size: int) -> float:
            """Seconds of a step with a chunk of this size."""
            if mixed:
                return self.costs.pass_of(len(rows), keys, size, job.computed_tokens)
            return rows_seconds + self.costs.pass_of(0, 0, size, job.computed_tokens)

        def with_repayment(size: int) -> float:
            """Seconds of this step and of those without a chunk that compensate for it."""
            return max(gap(size), fair * (gap(size) - rows_seconds) / (fair - rows_seconds))

        sizes = self._wide(sizes, gap)
        short = [n for n in sizes if gap(n) <= SLACK * self.limits.stall_target]
        return worthwhile(short or within(sizes, gap, self.longest_gap), with_repayment)

    @property
    def longest_gap(self) -> float:
        """Seconds that decoding rows may wait for a chunk, at most."""
        return max(self.limits.stall_target, LONGEST_GAP)

    def _wide(self, sizes: Sequence[int], gap: Callable[[int], float]) -> Sequence[int]:
        """The sizes from `WIDE` on, or all if the smallest of these takes too long."""
        wide = [n for n in sizes if n >= WIDE] or sizes[-1:]
        return wide if gap(wide[0]) <= self.longest_gap else sizes

    def fair(self, rows_seconds: float) -> float:
        """Average seconds that a token may take beside a prompt; without one, `rows_seconds`."""
        return max(self.limits.stall_target, FAIR * rows_seconds)

    def own_size(self, job: PrefillJob) -> int:
        """Tokens of the next chunk of a prompt that shares no pass, within the stall target. A
        prompt always has the same passes, because results depend on where they end."""
        sizes = self._sizes(job)
        few = [n for n in sizes if n <= SCORED_TOKENS] or sizes[:1]
        sizes = few if job.wants_prompt_logprobs else sizes
        seconds = partial(self._as_measured.pass_of, 0, 0, depth=job.computed_tokens)
        return worthwhile(within(sizes, seconds, self.limits.stall_target), seconds)

    def is_brief(self, job: PrefillJob) -> bool:
        """Whether decoding rows could wait for the whole prompt in one pass."""
        is_short = len(job.tokens) - job.estimated_cached <= min(BRIEF, self.limits.max_chunk)
        return is_short and self.duration(job, job.tokens_left) <= self.longest_gap

    def rest(self, job: PrefillJob) -> float:
        """Expected seconds to prefill what is left of the job's request."""
        depth = len(job.tokens) - job.tokens_left // 2  # on average
        return job.request_tokens_left * self.costs.pass_of(0, 0, REST, depth) / REST

    def duration(self, job: PrefillJob, tokens: int) -> float:
        """Expected seconds of the next `tokens` of a prompt in a pass of their own."""
        return self.costs.pass_of(0, 0, tokens, len(job.tokens) - job.tokens_left)

    def seconds(self, rows: Sequence[Row], chunk: Chunk | None = None, passes: int = 1) -> float:
        """Expected seconds to decode rows in so many passes, each with the chunk, if any."""
        load = self.load(rows, chunk)
        width = self.fixed.rows if self.fixed and rows else -(-len(rows) // passes)  # rounded up
        return passes * self.costs.pass_of(width, load.keys // passes, load.chunk, load.depth)

    def load(self, rows: Sequence[Row], chunk: Chunk | None = None) -> Load:
        """The load of a pass of these rows and this chunk."""
        size, depth = (0, 0) if chunk is None else (chunk.size, chunk.start)
        return Load(sum(row.length_to_cache for row in rows), size, depth, len(rows))

    def with_drafts(self, plan: StepPlan) -> Callable[[int], float]:
        """A function from the number of drafts in all rows to the seconds of the rows' pass."""
        chunk = plan.chunk.size if plan.chunk is not None and plan.mixed else 0
        rows, curve, pace = len(plan.rows), self.costs.curve, self.costs.pace["rows"]
        keys = self.load(plan.rows).keys

        @cache
        def seconds(drafts: int) -> float:
            if not drafts:
                return plan.pass_seconds
            more = pace * curve.with_drafts(drafts, rows + chunk, rows, keys)
            # a new shape costs `first`, and no pass before had as many cached tokens
            return plan.pass_seconds + (more + curve.first)

        return seconds

    def _sizes(self, job: PrefillJob) -> list[int]:
        if self.fixed:
            return [self.fixed.size(job.computed_tokens, len(job.tokens))]
        cut, total = bisect_right(job.cuts, job.computed_tokens), len(job.tokens)
        end = job.cuts[cut] if cut < len(job.cuts) else total
        return chunk_sizes(job.computed_tokens, end, total, self.limits.max_chunk, self.grid)


def chunk_sizes(start: int, end: int, total: int, largest: int, grid: int = 1) -> list[int]:
    """Sizes of a chunk from token `start`, ascending. The chunk may end at the next multiple of
    `grid` (of `SMALLEST` if `grid` is 1), of twice as many tokens, and so on up to `largest`, or at
    `end`, the latest end. On a grid, at least `TAIL` of the `total` tokens follow unless it ends at
    `end`: if only that is possible, the size may exceed `largest`."""
    found, size = set(), grid if grid > 1 else min(SMALLEST, largest)
    while size <= largest:
        stop = (start // size + 1) * size
        if stop < end and total - stop >= min(TAIL, grid):
            found.add(stop - start)
        size *= 2
    if end - start <= largest or not found:
        found.add(end - start)
    return sorted(found)


def within(sizes: Sequence[int], seconds: Callable[[int], float], target: float) -> list[int]:
    """Sizes that take at most `target` seconds, or little more time than the smallest one."""
    longest = max(target, LITTLE_MORE * seconds(sizes[0]))
    return [n for n in sizes if seconds(n) <= longest]


def worthwhile(sizes: Sequence[int], seconds: Callable[[int], float]) -> int:
    """The smallest size with nearly the best rate of all. Larger sizes gain almost nothing."""
    return _nearly_best(sizes, seconds)[0]


def _nearly_best(sizes: Sequence[int], seconds: Callable[[int], float]) -> list[int]:
    rates = {n: n / seconds(n) for n in sizes}
    enough = NEARLY * max(rates.values())
    return [n for n, rate in rates.items() if rate >= enough]


@dataclass(frozen=True)
class PassBytes:
    """Measured bytes of a pass, besides the weights and the caches of rows."""

    row: float = 0.0  # per row that decodes
    token: float = 0.0  # per token of a chunk, or per row
    pair: float = 0.0  # per pair of a new and a cached token; 0 if attention stores no scores
    key: float = 0.0  # per cached token alone; 0 if attention copies no keys and values


@dataclass(frozen=True)
class PassMemory:
    """Called with tokens and rows, it returns the bytes that their largest pass may take."""

    nbytes: PassBytes
    widest: int  # most tokens of a chunk
    deepest: Sequence[tuple[int, float]] = field(default=(), repr=False)
    """(tokens of a chunk, most cached tokens before it): time limits chunks deep in a prompt."""
    min_chunk: int = 0  # tokens that a chunk may always have, however long it takes

    @classmethod
    def of(cls, nbytes: PassBytes, curve: Curve, seconds: float, max_chunk: int) -> Self:
        """`seconds`: the longest time of a chunk, unless smaller ones lose much of the rate."""
        # of a chunk that no end cuts short
        sizes = chunk_sizes(0, 2 * max_chunk, 4 * max_chunk, max_chunk)
        min_chunk = worthwhile(sizes, curve.seconds)
        if curve.depths:  # deep in a prompt, attention is most of a pass
            min_chunk = max(min_chunk, worthwhile(sizes, lambda n: curve.per_key(n) or inf))
        longest = max(seconds, curve.seconds(min_chunk))
        widest = bisect_right(range(1, max_chunk + 1), longest, key=curve.seconds)
        deepest = []
        for n in [n for n in (*sizes, widest) if n <= widest]:
            left, per_key = longest - curve.seconds(n), curve.per_key(n)
            deepest.append((n, left / per_key if per_key > 0 else inf))
        return cls(nbytes, widest, deepest, min_chunk)

    def __call__(self, tokens: int, rows: int) -> int:
        """Bytes of the largest pass of this many rows, or over a prompt of this many tokens."""
        nbytes, chunk = self.nbytes, min(self.widest, tokens)
        pairs = max((min(n, chunk) * min(d, tokens) for n, d in self.deepest), default=0.0)
        pairs = max(pairs, min(self.min_chunk, chunk) * tokens)
        cached = nbytes.pair * pairs + nbytes.key * tokens
        return int(nbytes.row * rows + nbytes.token * max(chunk, rows) + cached)
