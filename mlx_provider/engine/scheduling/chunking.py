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
"""Least tokens of a chunk that fits the longest gap. Fewer are hardly faster on a GPU."""
BRIEF = 1024
"""A prompt of at most so many tokens runs in one pass before rows decode, if that takes no longer
than the longest gap."""
SLACK = 1.5
"""A step with a chunk may take this multiple of the stall target. If a wide chunk takes longer, it
may take as long as the longest gap."""
REST = 1024
"""Pass size, in tokens, for the estimate of the rest of a prompt."""
SCORED_TOKENS = 32
"""Most tokens of a pass that returns the logits of each token, which need the most memory."""
SMALLEST = 16
"""Passes of a prompt end at multiples of this, of twice as many tokens, and so on. So there are few
shapes, of which a GPU may have to plan or compile each."""
NEARLY = 0.9
"""A smaller chunk with this share of the best rate is good enough."""
LITTLE_MORE = 1.5
"""A larger chunk may take this multiple of the time of the smallest, whatever the target. With one
token per reading of the weights, a long prompt would take hours."""

GRID = 32
"""Passes of a prompt with recurrent state end at multiples of this, counted from its beginning, so
that the state does not depend on the time of passes. Recurrent rules compute tokens in chunks of
their own, and round differently if these chunks start elsewhere. This is a multiple of their
size."""
TAIL = 32
"""Least tokens of the last such pass, because kernels for fewer round differently, too."""

ROWS = 8
"""Rows of a decode pass: a GPU reads the weights for this many in little more time than for one."""
TOKENS = 256
"""Tokens of a prompt pass: enough for the best rate of most devices. Stored prefixes are cut to a
multiple of it, and other requests wait for one such pass."""


@dataclass(frozen=True)
class FixedShapes:
    """Pass shapes of a reproducible model, independent of other requests.

    The shapes of arrays choose the kernels, and each kernel rounds differently. So each decode pass
    has the same number of rows, with padding and with separate keys per row, and each prompt pass
    but the last the same number of tokens, counted from the beginning of the prompt, so that a
    stored prefix equals a computed one."""

    rows: int
    tokens: int

    @classmethod
    def within(cls, max_rows: int, max_chunk: int) -> Self:
        return cls(min(ROWS, max_rows), min(TOKENS, max_chunk))

    def whole(self, tokens: int) -> int:
        """Tokens among the first `tokens` that whole passes have computed."""
        return tokens // self.tokens * self.tokens

    def size(self, done: int, total: int) -> int:
        """Tokens of the pass after the first `done` tokens of a prompt."""
        return min(self.whole(done) + self.tokens, total) - done


class Chunking:
    """Has no state except the measurements in `costs`."""

    def __init__(
        self, limits: Limits, costs: Costs, *, grid: int, fixed: FixedShapes | None
    ) -> None:
        """`grid`: prompt passes end at multiples of this, and at their cuts. `fixed`: pass shapes
        depend on no clock and on no other request."""
        self.limits = limits
        self.costs = costs
        self.grid = min(grid, limits.max_chunk)
        self.fixed = fixed
        self._as_measured = Costs(costs.curve)
        """Costs at the pace of the calibration, which later passes do not change."""

    def size(
        self, job: PrefillJob, rows: Sequence[Row], rows_seconds: float = 0, *, mixed: bool = False
    ) -> int:
        """Tokens of the next chunk of a prompt, in the pass of the decoding `rows` or behind it.
        `rows_seconds`: seconds of the rows' pass without them."""
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
        keys, fair = sum(row.cached_length for row in rows), self.fair(rows_seconds)

        def gap(size: int) -> float:
            if mixed:
                return self.costs.pass_of(len(rows), keys, size, job.computed_tokens)
            return rows_seconds + self.costs.pass_of(0, 0, size, job.computed_tokens)

        def with_repayment(size: int) -> float:
            """Seconds with the steps without a chunk that follow and compensate for it."""
            return max(gap(size), fair * (gap(size) - rows_seconds) / (fair - rows_seconds))

        sizes = self._wide(sizes, gap)
        short = [n for n in sizes if gap(n) <= SLACK * self.limits.stall_target]
        return worthwhile(short or within(sizes, gap, self.longest_gap), with_repayment)

    @property
    def longest_gap(self) -> float:
        return max(self.limits.stall_target, LONGEST_GAP)

    def _wide(self, sizes: Sequence[int], gap: Callable[[int], float]) -> Sequence[int]:
        """The sizes without small ones, unless others take longer than the longest gap."""
        wide = [n for n in sizes if n >= WIDE] or sizes[-1:]
        return wide if gap(wide[0]) <= self.longest_gap else sizes

    def fair(self, rows_seconds: float) -> float:
        """Seconds that a token of decoding rows may take on average beside a prompt, if it takes
        `rows_seconds` without."""
        return max(self.limits.stall_target, FAIR * rows_seconds)

    def own_size(self, job: PrefillJob) -> int:
        """Tokens of a chunk in a pass of its own, within the stall target. A prompt always has
        the same passes, because results depend on where they end."""
        sizes = self._sizes(job)
        few = [n for n in sizes if n <= SCORED_TOKENS] or sizes[:1]
        sizes = few if job.wants_prompt_logprobs else sizes
        seconds = partial(self._as_measured.pass_of, 0, 0, depth=job.computed_tokens)
        return worthwhile(within(sizes, seconds, self.limits.stall_target), seconds)

    def is_brief(self, job: PrefillJob) -> bool:
        """Whether decoding rows could wait for the whole prompt in one pass."""
        brief = len(job.tokens) - job.estimated_cached <= min(BRIEF, self.limits.max_chunk)
        return brief and self.duration(job, job.tokens_left) <= self.longest_gap

    def rest(self, job: PrefillJob) -> float:
        depth = len(job.tokens) - job.tokens_left // 2
        return job.request_tokens_left * self.costs.pass_of(0, 0, REST, depth) / REST

    def duration(self, job: PrefillJob, tokens: int) -> float:
        return self.costs.pass_of(0, 0, tokens, len(job.tokens) - job.tokens_left)

    def seconds(self, rows: Sequence[Row], chunk: Chunk | None = None, passes: int = 1) -> float:
        load = self.load(rows, chunk)
        width = self.fixed.rows if self.fixed and rows else -(-len(rows) // passes)
        return passes * self.costs.pass_of(width, load.keys // passes, load.chunk, load.depth)

    def load(self, rows: Sequence[Row], chunk: Chunk | None = None) -> Load:
        size, depth = (0, 0) if chunk is None else (chunk.size, chunk.start)
        return Load(sum(row.cached_length for row in rows), size, depth, len(rows))

    def with_drafts(self, plan: StepPlan) -> Callable[[int], float]:
        """Seconds of a step's pass by its number of drafts, spread over its rows."""
        chunk = plan.chunk.size if plan.chunk is not None and plan.mixed else 0
        rows, curve, pace = len(plan.rows), self.costs.curve, self.costs.pace["rows"]
        keys = self.load(plan.rows).keys

        @cache
        def seconds(drafts: int) -> float:
            if not drafts:
                return plan.pass_seconds
            more = pace * curve.with_drafts(drafts, rows + chunk, rows, keys)
            # no pass before had as many cached tokens
            return plan.pass_seconds + (more + curve.first)

        return seconds

    def _sizes(self, job: PrefillJob) -> list[int]:
        if self.fixed:
            return [self.fixed.size(job.computed_tokens, len(job.tokens))]
        cut, total = bisect_right(job.cuts, job.computed_tokens), len(job.tokens)
        end = job.cuts[cut] if cut < len(job.cuts) else total
        return chunk_sizes(job.computed_tokens, end, total, self.limits.max_chunk, self.grid)


def chunk_sizes(start: int, end: int, total: int, largest: int, grid: int = 1) -> list[int]:
    """Sizes of a chunk from `start`, ascending: to the next multiple of each of the fixed sizes up
    to `largest`, or to `end`, the latest end of the next chunk. `total`: tokens of the prompt;
    `grid`: the smallest of the fixed sizes, if it matters to the model. The first size may exceed
    `largest` if no smaller chunk ends on the grid."""
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
    """Sizes within `target` seconds, or that take little more time than the smallest, because
    decoding rows wait that long anyway."""
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
    row: float = 0.0
    """Per row that decodes."""
    token: float = 0.0
    """Per further token."""
    pair: float = 0.0
    """Per pair of a new token and a cached one. 0 if attention never stores its scores."""
    key: float = 0.0
    """Per cached token, however many are new. 0 if attention copies no keys and values."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of passes over rows or a chunk, from the measurements and the chunk limits."""

    nbytes: PassBytes
    widest: int
    """Most tokens of a chunk."""
    deepest: Sequence[tuple[int, float]] = field(default=(), repr=False)
    """(tokens of a chunk, largest number of cached tokens before it). A deep chunk is narrow,
    because its time is limited."""
    min_chunk: int = 0
    """Tokens that a chunk may always have, however long it takes."""

    @classmethod
    def of(cls, nbytes: PassBytes, curve: Curve, seconds: float, max_chunk: int) -> Self:
        # of a chunk that no end cuts short
        sizes = chunk_sizes(0, 2 * max_chunk, 4 * max_chunk, max_chunk)
        min_chunk = worthwhile(sizes, curve.seconds)
        if curve.depths:  # deep in a prompt, attention is most of a pass
            min_chunk = max(min_chunk, worthwhile(sizes, lambda n: curve.per_key(n) or inf))
        longest = max(seconds, curve.seconds(min_chunk))
        widest = bisect_right(range(1, max_chunk + 1), longest, key=curve.seconds)
        left = [(n, longest - curve.seconds(n), curve.per_key(n)) for n in (*sizes, widest)]
        deepest = [(n, s / slope if slope > 0 else inf) for n, s, slope in left if n <= widest]
        return cls(nbytes, widest, deepest, min_chunk)

    def __call__(self, tokens: int, rows: int) -> int:
        """Bytes of the largest pass of this many rows, or over a prompt of this many tokens."""
        nbytes, chunk = self.nbytes, min(self.widest, tokens)
        pairs = max((min(n, chunk) * min(d, tokens) for n, d in self.deepest), default=0.0)
        pairs = max(pairs, min(self.min_chunk, chunk) * tokens)
        cached = nbytes.pair * pairs + nbytes.key * tokens
        return int(nbytes.row * rows + nbytes.token * max(chunk, rows) + cached)
