"""A scheduler and a calibration on a device that punishes what an H100 punishes, and on one like an
M3 Max.

Nothing is computed: a pass advances a clock by the tables below. They are those of Qwen3-8B in 4
bit: products by form, timed on an H100 (mlx 0.32.4) before there was the plugin `cuda`; the point
at 192 is assumed, and costs of the host are fitted. Those of an M3 Max are estimated from published
figures of its bandwidth and its compute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from few_passes import OF_THE_PRODUCT
from mlx_provider.engine.execution.batch_layout import MAX_RATIO, PADDED, SHORT
from mlx_provider.engine.request import PrefillJob, Request, Row
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.engine.scheduling.ledger import Limits, MemoryProfile
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.engine.scheduling.step import Chunk
from mlx_provider.serving import calibration
from mlx_provider.serving.calibration import DEPTHS, LONGEST_ROW, REPEATS, Times
from mlx_provider.serving.probe import Probe
from mlx_provider.testing.driver import TokenLedger, new_request
from replaced import Replaced

LAYERS, OPERATIONS = 36, 19
"""Operations of a layer, as counted."""
KEY = 147_456
"""Bytes of a cached token."""
DIAL = 0.1
H100 = (
    (1, 5.9e-3), (8, 5.7e-3), (16, 5.0e-3), (32, 7.8e-3), (192, 23e-3), (256, 24.4e-3),
    (512, 28.4e-3), (2048, 54.4e-3),
)  # fmt: skip
"""Seconds of the quantised products of so many tokens."""


@dataclass
class Device:
    """Seconds of passes, some of which are longer the first time; see `calibration.OnDevice`."""

    products: Callable[[int], float]
    key: float
    """Seconds in which one row reads one cached token."""
    pair: float
    """Seconds of attention for a token of a chunk and a cached one."""
    launch: float
    """Seconds of the host for one operation."""
    group: float
    """Seconds of the host in each layer for each further group of rows."""
    row: float = 0.0
    """Seconds of the host for each further row."""
    plan: float = 0.0
    """Seconds more of the first pass with so many queries and keys."""
    kind: float = 0.0
    """Seconds more of the first pass of a kind."""
    apart: float = 0.0
    """Seconds of the products of each token where every token is a row (N, 1, d)."""
    slower: float = 1.0
    """Factor on all of it."""
    depth: int = 0
    took: float = 0.0
    """Seconds of all passes that were not the first of their shape."""
    kinds: set[tuple[object, ...]] = field(default_factory=set)
    shapes: set[tuple[int, int]] = field(default_factory=set)

    def run(
        self, lengths: Sequence[int], layout: str = "grouped", chunk: int = 0, start: int = 0
    ) -> float:
        """Seconds of a pass of rows of these lengths, and of a chunk."""
        groups = groups_of(lengths, PADDED if layout == "padded" else SHORT)
        width = len(lengths) + chunk
        parts = len(groups) + bool(chunk)
        products = self.products(width)
        if lengths and width > 1:
            products = max(products, self.apart * width)
        read = self.key * sum(len(group) * max(group) for group in groups)
        took = products + read + self.pair * chunk * (start + chunk / 2)
        host = LAYERS * (self.launch * OPERATIONS + self.group * (parts - 1))
        took = self.slower * max(took, host + self.row * max(0, len(lengths) - 1))
        kind = (bool(lengths), bool(chunk), next(n for n in (1, 16, 64, 192, 4096) if width <= n))
        shape = (chunk, start + chunk)
        new = self.kind * (kind not in self.kinds)
        new += self.plan * (chunk > 1 and shape not in self.shapes)
        self.took += 0.0 if new else took
        self.kinds.add(kind)
        self.shapes.add(shape)
        return took + new

    def chunk(self, tokens: int, *, deep: bool = False) -> list[float]:
        start = self.depth if deep else 0
        return [self.run((), chunk=tokens, start=start) for _ in range(REPEATS)]

    def deepen(self, depth: int) -> bool:
        self.depth = depth
        return True

    def rows(self, lengths: Sequence[int], layout: str, chunk: int = 0) -> list[float]:
        return [self.run(lengths, layout, chunk) for _ in range(REPEATS)]


def groups_of(lengths: Sequence[int], short: int) -> list[list[int]]:
    """Lengths of the rows of each group, as `Layout` forms them."""
    found: list[list[int]] = []
    for length in sorted(lengths):
        if not found or length > max(short, MAX_RATIO * found[-1][0]):
            found.append([])
        found[-1].append(length)
    return found


def _h100(width: int) -> float:
    at = bisect_left(H100, (width, 0.0))
    if at in (0, len(H100)):
        return H100[min(at, len(H100) - 1)][1] * max(1.0, width / 2048)
    (n, s), (m, t) = H100[at - 1], H100[at]
    return s + (width - n) * (t - s) / (m - n)


def _m3_max(width: int) -> float:
    reading, tile = 4.7e9 / 390e9, 32 * 16.2e9 / 11.5e12
    return reading * max(1, 0.85 * ceil(width / 5)) if width < 13 else tile * ceil(width / 32)


def h100(**more: float) -> Device:
    """One row takes 6.65 ms, 16 in one group 16.8, and 16 of unlike lengths 60."""
    costs = {"launch": 9.7e-6, "row": 0.68e-3, "group": 80e-6, "plan": 0.07, "kind": 1.0}
    return Device(_h100, KEY / 2.7e12, 1e-9, **costs | more)


def m3_max() -> Device:
    """A Mac makes no plans, and one matrix of all rows."""
    return Device(_m3_max, KEY / 390e9, 6.6e-8, launch=3e-6, group=9e-6)


PROBE = Probe("grouped", MemoryProfile(0, KEY), (), mixes=True, padded=True)


class Engine:
    """Runs the plans of a scheduler, one after the other, after a calibration."""

    def __init__(
        self,
        device: Device,
        *,
        memory: int = 2**50,
        queue: int = 256,
        reserve: int = 2048,
        curve: Curve | None = None,
    ) -> None:
        """`memory`: tokens of all rows. `curve`: that an earlier load has stored."""
        self.device, self.now, self.read = device, 0.0, 0.0
        with Replaced() as patch:
            for name, value in OF_THE_PRODUCT.items():
                patch.setattr(calibration, name, value)
            found = Times(device, 40_960, DEPTHS, LONGEST_ROW).measure(PROBE)
        self.measured, self.layout = found, found.probe.layout
        ledger = TokenLedger(Limits(64, queue, DIAL, 2048, reserve))
        ledger.give(available=lambda: memory)
        self.scheduler = Scheduler(ledger, Costs(curve or found.curve))
        self.first: dict[Request, float] = {}
        """When each request had its first token."""
        self.gaps: list[float] = []
        self.chunks: list[Chunk] = []
        self.tokens = 0
        self.expected = 0.0

    def estimate_of(self, prompt: int) -> float:
        """The expected seconds of all steps for a prompt, as a share of the real ones."""
        expected, began = self.expected, self.now
        self.until(self.ask(prompt))
        return (self.expected - expected) / (self.now - began)

    def ask(self, prompt: int, reply: int = 10**9, **more: Any) -> Request:
        return self.submit(prompt, reply, **more).request

    def submit(self, prompt: int, reply: int, **more: Any) -> PrefillJob:
        """`more`: tenant and share."""
        request = new_request([1] * prompt, max_tokens=reply, **more)
        return self.scheduler.submit(request, self.now)

    def until(self, *requests: Request) -> Engine:
        """Run until these have their first tokens."""
        while not all(request in self.first for request in requests):
            self.step()
        return self

    def step(self) -> None:
        scheduler, device = self.scheduler, self.device
        record = scheduler.schedule(self.now, mixes=True, stalled=self.now - self.read)
        scheduler.apply(record)
        for job in record.to_begin:
            job.cache = []
        plan = record.plan
        self.expected += plan.pass_seconds + plan.chunk_seconds
        scheduler.charge_step(plan)
        chunk, sizes, costs = plan.chunk, scheduler.chunking, scheduler.costs
        if plan.rows:
            along = chunk if plan.mixed else None
            load, lengths = sizes.load(plan.rows, along), [row.length for row in plan.rows]
            took = device.run(lengths, self.layout, load.chunk, load.depth)
            self.now += took
            costs.update(plan.pass_seconds, took, [load])
            self.gaps.append(self.now - self.read)
            self.read = self.now
            for row in plan.rows:
                self._token(row)
        if chunk and not plan.mixed:
            took = device.run((), chunk=chunk.size, start=chunk.start)
            self.now += took
            costs.update(plan.chunk_seconds, took, [sizes.load((), chunk)])
        if chunk:
            self.chunks.append(chunk)
            self._prefilled(chunk.job, chunk)

    def _token(self, row: Row) -> None:
        row.tokens.append(1)
        self.scheduler.charge_token(row.request)
        self.tokens += 1
        if len(row.tokens) >= row.request.max_tokens:
            self.scheduler.remove_request(row.request)

    def _prefilled(self, job: PrefillJob, chunk: Chunk) -> None:
        job.computed_tokens += chunk.size
        self.scheduler.charge_chunk(chunk)
        if job.tokens_left:
            return
        if not self.scheduler.running:
            self.read = self.now
        self.scheduler.end_prefill(job)
        self.first[job.request] = self.now
        for row in job.rows:
            self.scheduler.add_row(row)
            self._token(row)
