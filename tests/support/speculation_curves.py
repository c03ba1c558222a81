"""Drafts on the curves of devices that people have: what the policy makes of them, no clock.

Rows decode as the engine runs them: a pass is launched before the last one's tokens are read,
unless it takes drafts along; the device then waits while the host reads, guesses and launches.
The curves are estimated from published figures: what a chip reads and computes, and what a model
needs of it. They prove decisions, not speed: no device was measured.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from mlx_provider.engine.request import Request, Row, SamplingParams
from mlx_provider.engine.scheduling.chunking import LONGEST_GAP
from mlx_provider.engine.scheduling.costs import Costs, Curve, PassTimer
from mlx_provider.engine.scheduling.scheduler import Limits, Scheduler
from mlx_provider.engine.scheduling.step import StepPlan
from mlx_provider.engine.speculation.policy import Kind, Policy, RowAcceptance
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.records import Prompt
from mlx_provider.testing.driver import TokenLedger, TokenOutput

WIDTHS = (1, 4, 8, 16, 32, 64, 256)
DEEP_WIDTHS = (1, 8, 64, 256, 1024)
DEPTH = 8192
"""Of the deep cache over which a device is measured."""
SCATTERED = 0.15
"""Share of all experts whose reading takes as long as that of the few that one token takes."""


@dataclass(frozen=True)
class Chip:
    """What a device reads and computes in a second."""

    bytes: float
    """Of weights and keys."""
    products: float
    """Floating-point operations of quantised matrix products, in full tiles."""
    attention: float
    """Those of attention over a long cache by many queries,"""
    vector: float
    """and by a few, which have a kernel of their own where queries times query heads for a KV head
    are at most 32."""
    plateau: int
    """More queries than those, up to so many, take as long as so many."""
    tile: int = 32
    """Rows of a tile of matrix products; a part of one takes as long as all of it."""
    few: int = 13
    """Fewer rows than this take no tile: five of them cost what one costs."""
    launches: float = 0.0
    """Seconds of a pass that are neither reading nor computing."""


@dataclass(frozen=True)
class Model:
    """What one pass needs."""

    weights: float
    """Bytes that every pass reads."""
    products: float
    """Floating-point operations of a token."""
    key: float
    """Bytes of a cached token."""
    heads: int
    """Query heads for a KV head."""
    bandwidth: float
    """Share of the bandwidth at which one query reads the cache: less with few KV heads."""
    pair: float
    """Floating-point operations of a new token and a cached one."""
    experts: float = 0.0
    """Bytes of all experts, of which a token takes 8 in 128."""
    scattered: float = 1.6
    """Times longer that products of few tokens for each of many experts take."""


CHIPS = {
    "M3 Max": Chip(390e9, products=11.5e12, attention=9e12, vector=2.1e12, plateau=78),
    "H200": Chip(
        4.6e12, products=350e12, attention=400e12, vector=40e12, plateau=528, tile=64,
        launches=0.0015,
    ),
}  # fmt: skip
"""M3 Max: 40 cores. Attention of a layer with
32 query heads of 128 over 32k keys takes 2.03 ms for 8 queries and 4.63 ms for 12 to 48 on an M3
Max, and 2.99 ms for 64 (mlx issue 3826). H200: no such table is
known; one tile of 128 queries for each of 32 heads on 132 multiprocessors."""
MODELS = {
    "dense 8B": Model(4.7e9, 16.2e9, 147_456, heads=4, bandwidth=1.0, pair=0.59e6),
    "30B-A3B": Model(1.5e9, 6.4e9, 98_304, heads=8, bandwidth=0.7, pair=0.8e6, experts=15.6e9),
}  # fmt: skip
"""In 4 bit. One query reads the cache of 4 KV heads of 256 at 0.19 to 0.36 of the bandwidth (mlx
issue 3837)."""


@dataclass(frozen=True)
class Estimate:
    """A device that is known from its figures."""

    chip: Chip
    model: Model

    def seconds(self, rows: int, keys: int, chunk: int = 0, depth: int = 0) -> float:
        attended = keys * self.per_key(1) + (depth * self.per_key(chunk) if chunk else 0.0)
        return self.chip.launches + self._products(rows + chunk) + attended

    def per_key(self, queries: int) -> float:
        """Seconds of attention for each cached token of a row with so many queries."""
        chip, model = self.chip, self.model
        read = model.key / (chip.bytes * model.bandwidth)
        if queries <= 8 and queries * model.heads <= 32:
            return max(read, queries * model.pair / chip.vector)
        return max(read, max(queries, chip.plateau) * model.pair / chip.attention)

    def measured(self) -> Curve:
        deep: dict[int, float] = {}
        for width in DEEP_WIDTHS:
            last, seconds = [(1, 0.0), *deep.items()][-1]
            if width <= 64 or seconds * width / last <= LONGEST_GAP:
                deep[width] = self.seconds(0, 0, width, DEPTH)
        short = {n: self.seconds(0, 0, n) for n in sorted({*WIDTHS, *deep})}
        return Curve.through(short, deep, DEPTH)

    def _products(self, width: int) -> float:
        chip, model = self.chip, self.model
        once = model.weights / chip.bytes
        if model.experts:
            taken = max(SCATTERED, 1 - (1 - 8 / 128) ** width) * model.experts / chip.bytes
            return once + taken + model.scattered * width * model.products / chip.products
        if width < chip.few:
            return once * max(1, 0.85 * ceil(width / 5))
        tile = chip.tile * model.products / chip.products
        return max(once, tile * ceil(width / chip.tile))


STREAM = 2_000
"""Tokens that each row holds."""
WARM = 500
"""Steps after which a rate is no longer that of a policy that learns."""
STEPS = 1_500
LAUNCHES = 118 * 3e-6
"""Seconds of the kernels that one group of rows more takes in 36 layers."""
ALONE: Kind = frozenset({0})
"""Passes with drafts of the only drafter."""
NOTHING = -1.0
"""Chance of a row for which there is no draft."""
CPU = Chip(20e9, products=500e9, attention=500e9, vector=500e9, plateau=1, tile=8, few=0)
SMALL = Model(weights=80e6, products=160e6, key=2_048, heads=4, bandwidth=1.0, pair=16e3)
"""A small model on a CPU without a GPU: 4 ms of reading, tiles of 8 rows."""

Luck = Callable[[int], float]
"""(tokens of the reply so far) -> chance that each next draft holds."""


@dataclass(frozen=True)
class Guessing:
    """What one round of guesses takes: seconds, and a share of a pass of one token."""

    seconds: float = 0.0
    share: float = 0.0

    def round(self, device: Estimate) -> float:
        return self.seconds + self.share * device.seconds(1, STREAM)


DRAFTERS = {
    "lookup": Guessing(seconds=1e-4),
    "MTP": Guessing(share=1 / 30),
    "draft model": Guessing(share=1 / 8),
}
DEVICES: Mapping[str, Estimate] = {
    "M3 Max, dense 8B": Estimate(CHIPS["M3 Max"], MODELS["dense 8B"]),
    "M3 Max, 30B-A3B": Estimate(CHIPS["M3 Max"], MODELS["30B-A3B"]),
    "H200, dense 8B": Estimate(CHIPS["H200"], MODELS["dense 8B"]),
    "CPU, small": Estimate(CPU, SMALL),
}


@dataclass(frozen=True)
class Outcome:
    """Of rows that decode with drafts."""

    ratio: float
    """Times the tokens a second of the same rows without, once the policy has seen some steps."""
    learning: float
    """Plain steps lost until then; below 0: won."""
    accepted: float
    """Share of the drafts that held."""
    drafted: float
    """Drafts a step."""
    slowest: float
    """Times its plain rate that the slowest row has."""


@dataclass
class Draw:
    """One row: how its drafts fall out."""

    luck: Luck
    dice: random.Random
    odds: RowAcceptance = field(default_factory=RowAcceptance)
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0

    def guess(self, wanted: int) -> int:
        self.drafts = wanted if self.luck(self.tokens) >= 0 else 0
        return self.drafts

    def passed(self) -> int:
        """Take what held of its drafts, and the token after."""
        chance = self.luck(self.tokens)
        fell = (at for at in range(self.drafts) if self.dice.random() >= chance)
        held = next(fell, self.drafts)
        self.tokens += 1 + held
        self.accepted += held
        return held


@dataclass
class Bench:
    """Rows on a device, with the engine's own scheduler, costs and timer."""

    device: Estimate
    rows: Sequence[Draw]
    guessing: Guessing
    host: float
    """Seconds of the host for each step: it reads tokens, and launches."""
    policy: Policy
    now: float = 0.0
    free: float = 0.0
    drafted: bool = False
    """The last pass took drafts along, and was not read yet."""

    def __post_init__(self) -> None:
        self.costs = Costs(self.device.measured())
        self.scheduler = _decoding(len(self.rows), self.costs)
        self.timer = PassTimer(self.costs)
        self.keys = STREAM * len(self.rows)

    def step(self) -> int:
        """One pass; drafts that it took along."""
        plan = self.scheduler.schedule(self.now).plan
        seconds = partial(self._seconds, plan)
        wanted = self._wanted(seconds)
        if not any(wanted) and not self.drafted:
            self._pipelined(plan.pass_seconds)
            return 0
        self._catch_up()
        drafts, rounds = self._guessed(wanted)
        self.now += self.host
        self.timer.launch(seconds(drafts), self.now)
        self.free = self.now + self._pass([row.drafts for row in self.rows])
        if drafts:
            self.policy.costs[ALONE].add_times(
                self.host, rounds * self.guessing.round(self.device), rounds
            )
        self.drafted = drafts > 0
        if not drafts:
            self._take()
        return drafts

    def _seconds(self, plan: StepPlan, tokens: int) -> float:
        return self.scheduler.chunking.with_drafts(plan)(tokens)

    def _wanted(self, seconds: Callable[[int], float]) -> list[int]:
        odds = [[row.odds] for row in self.rows]
        asked = self.policy.choose(odds, 0, seconds)
        self.policy.end_step()
        return [sum(ask.drafts for ask in asks) for asks in asked]

    def _pipelined(self, expected: float) -> None:
        """The next pass is launched while the last one runs."""
        ended = self.free
        self.timer.launch(expected, self.now)
        self.free = max(self.free, self.now + self.host) + self.device.seconds(
            len(self.rows), self.keys
        )
        self.now = max(self.now + self.host, ended)
        self.timer.end(self.now, left=1)
        self._take()

    def _pass(self, drafts: Sequence[int]) -> float:
        """Seconds: of one pass, and of what rows with drafts have for themselves."""
        together = self.device.seconds(len(drafts) + sum(drafts), self.keys)
        return together + sum(apart(self.device, count) for count in drafts if count)

    def _catch_up(self) -> None:
        self.now = max(self.now, self.free)
        drafts = sum(row.drafts for row in self.rows) if self.drafted else 0
        times = self.timer.end(self.now, usual=not drafts)
        if drafts:
            self.policy.costs[ALONE].add_pass(drafts, times)
        if self.drafted:
            self._take()
        self.drafted = False

    def _take(self) -> None:
        for row in self.rows:
            drafts, held = row.drafts, row.passed()
            if drafts:
                self.policy.learn(0, row.odds, drafts, held)
            row.drafts = 0

    def _guessed(self, wanted: Sequence[int]) -> tuple[int, int]:
        """All drafts, and the rounds that they took."""
        if not any(wanted):
            return 0, 0
        asked = [(row, count) for row, count in zip(self.rows, wanted, strict=True) if count]
        found = [row.guess(count) for row, count in asked]
        for (row, _), count in zip(asked, found, strict=True):
            if not count:
                self.policy.learn(0, row.odds, 0, 0)
        rounds = max(found)
        self.now += max(1, rounds) * self.guessing.round(self.device)
        return sum(found), rounds


def apart(device: Estimate, drafts: int) -> float:
    """Seconds that a row with so many drafts adds to its pass, beside their width: its attention
    has kernels of its own."""
    return LAUNCHES + STREAM * (device.per_key(1 + drafts) - device.per_key(1))


def simulate(
    device: Estimate,
    luck: Sequence[Luck],
    guessing: Guessing,
    *,
    host: float = 0.002,
    steps: int = STEPS,
    warm: int = WARM,
    policy: Policy | None = None,
    seed: int = 0,
) -> Outcome:
    """Rows of that luck, with drafts, beside the same rows without."""
    rows = [Draw(each, random.Random(f"{seed}-{at}")) for at, each in enumerate(luck)]
    bench = Bench(device, rows, guessing, host, policy or Policy())
    plain = max(host, device.seconds(len(rows), STREAM * len(rows)))
    drafts = held = 0
    learning = 0.0
    began, before = 0.0, [0] * len(rows)
    for step in range(steps):
        if step == warm:
            learning = bench.now / plain - sum(row.tokens for row in rows) / len(rows)
            began, before = bench.now, [row.tokens for row in rows]
            drafts = 0
            held = -sum(row.accepted for row in rows)
        drafts += bench.step()
    took = (bench.now - began) / plain
    gained = [row.tokens - old for row, old in zip(rows, before, strict=True)]
    held += sum(row.accepted for row in rows)
    return Outcome(
        ratio=sum(gained) / len(rows) / took,
        learning=learning,
        accepted=held / drafts if drafts else 0.0,
        drafted=drafts / (steps - warm),
        slowest=min(gained) / took,
    )


def reachable(device: Estimate, chance: float, guessing: Guessing, host: float, most: int) -> float:
    """Times the plain rate that one row can have, if everything is known beforehand."""
    plain = max(host, device.seconds(1, STREAM))

    def rate(drafts: int) -> float:
        tokens = sum(chance**held for held in range(drafts + 1))
        took = device.seconds(1 + drafts, STREAM) + apart(device, drafts)
        return tokens * plain / (took + host + drafts * guessing.round(device))

    return max(rate(drafts) for drafts in range(1, most + 1))


def steady(chance: float) -> Luck:
    return lambda tokens: chance


def turning(before: float, after: float, at: int) -> Luck:
    """Another chance from some token on."""
    return lambda tokens: before if tokens < at else after


def copying(chance: float, copied: int, written: int) -> Luck:
    """Text of which parts are found elsewhere; between them there is nothing to draft."""
    return lambda tokens: chance if tokens % (copied + written) < copied else NOTHING


def _decoding(rows: int, costs: Costs) -> Scheduler:
    """A scheduler whose rows decode."""
    scheduler = Scheduler(TokenLedger(Limits(64, 256, 0.1, 2048, 2048)), costs)
    for at in range(rows):
        request = Request(f"{at}", Prompt([1] * STREAM), SamplingParams(), 1000, EventQueue())
        request.rows = [Row(request, 0, TokenOutput())]
        scheduler.end_prefill(scheduler.submit(request, 0.0))
        scheduler.add_row(request.rows[0])
    return scheduler
