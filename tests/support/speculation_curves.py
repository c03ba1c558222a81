"""Drafts on simulated devices: what the policy makes of them, without a clock.

Rows decode as the engine runs them: a pass is launched before the last one's tokens are read,
unless it takes drafts along; the device then waits while the host reads, guesses and launches.
The devices are estimated from published figures, except for the products of the H100, which were
timed. They prove decisions, not speed.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from mlx_provider.engine.scheduling.costs import Costs, Curve, PassTimer
from mlx_provider.engine.scheduling.ledger import Limits
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.engine.scheduling.step import StepPlan
from mlx_provider.engine.speculation.policy import Kind, Policy, RowAcceptance
from mlx_provider.testing.driver import TokenLedger, new_request
from simulated_engine import KEY, h100, m3_max

WIDTHS = (1, 4, 8, 16, 32, 64, 256)


@dataclass(frozen=True)
class Device:
    products: Callable[[int], float]
    """Seconds of the products of so many tokens."""
    key: float
    """Seconds in which a row reads one cached token,"""
    query: float
    """and in which it attends to one for each of its new tokens, if these are at most `few`."""
    few: int = 8
    many: float = 0.0
    """Seconds of attention of more new tokens to a cached one."""

    def seconds(self, width: int, keys: int) -> float:
        return self.products(width) + keys * self.per_key(1)

    def per_key(self, queries: int) -> float:
        """Seconds of attention for each cached token of a row with so many new tokens."""
        return max(self.key, queries * self.query if queries <= self.few else self.many)

    def measured(self) -> Curve:
        short = {width: self.products(width) for width in WIDTHS}
        depth = 8192
        deep = {width: short[width] + depth * self.per_key(width) for width in (1, 8)}
        return Curve.through(short, deep, depth)


def _experts(width: int) -> float:
    """Of a model with 3B of 30B in use: 8 of 128 experts for each token, in 4 bit, on an M3 Max."""
    read = 1.5e9 + max(0.15, 1 - (1 - 8 / 128) ** width) * 15.6e9
    return read / 390e9 + 1.6 * width * 6.4e9 / 11.5e12


def _small(width: int) -> float:
    """Of a small model on a CPU: 4 ms of reading, tiles of 8 rows."""
    return max(0.004, 0.00256 * ceil(width / 8))


DEVICES: Mapping[str, Device] = {
    "M3 Max, dense 8B": Device(m3_max().products, KEY / 390e9, 2.8e-7),
    "M3 Max, 30B-A3B": Device(_experts, 3.6e-7, 3.8e-7, few=4, many=6.9e-6),
    "H100, dense 8B": Device(h100().products, KEY / 2.7e12, 1.5e-8),
    "CPU, small": Device(_small, 1e-7, 3.2e-8),
}
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

Luck = Callable[[int], float]
"""(tokens of the reply so far) -> chance that each next draft holds."""


@dataclass(frozen=True)
class Guessing:
    """What one round of guesses takes: seconds, and a share of a pass of one token."""

    seconds: float = 0.0
    share: float = 0.0

    def round(self, device: Device) -> float:
        return self.seconds + self.share * device.seconds(1, STREAM)


DRAFTERS = {
    "lookup": Guessing(seconds=1e-4),
    "MTP": Guessing(share=1 / 30),
    "draft model": Guessing(share=1 / 8),
}


@dataclass(frozen=True)
class Outcome:
    """Of rows that decode with drafts."""

    ratio: float
    """Times the tokens a second of the same rows without, once the policy has seen some steps."""
    learning: float
    """Plain steps lost until then; below 0: won."""
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

    def guess(self, wanted: int) -> int:
        self.drafts = wanted if self.luck(self.tokens) >= 0 else 0
        return self.drafts

    def passed(self) -> int:
        """Take what held of its drafts, and the token after."""
        chance = self.luck(self.tokens)
        fell = (at for at in range(self.drafts) if self.dice.random() >= chance)
        held = next(fell, self.drafts)
        self.tokens += 1 + held
        return held


@dataclass
class Bench:
    """Rows on a device, with the engine's own scheduler, costs and timer."""

    device: Device
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

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now).plan
        seconds = partial(self._seconds, plan)
        wanted = self._wanted(seconds)
        if not any(wanted) and not self.drafted:
            self._pipelined(plan.pass_seconds)
            return
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


def apart(device: Device, drafts: int) -> float:
    """Seconds that a row with so many drafts adds to its pass, beside their width: its attention
    has kernels of its own."""
    return LAUNCHES + STREAM * (device.per_key(1 + drafts) - device.per_key(1))


def simulate(
    device: Device,
    luck: Sequence[Luck],
    guessing: Guessing,
    *,
    host: float = 0.002,
    steps: int = STEPS,
    warm: int = WARM,
    policy: Policy | None = None,
) -> Outcome:
    """Rows of that luck, with drafts, beside the same rows without."""
    rows = [Draw(each, random.Random(f"0-{at}")) for at, each in enumerate(luck)]
    bench = Bench(device, rows, guessing, host, policy or Policy())
    plain = max(host, device.seconds(len(rows), STREAM * len(rows)))
    for _ in range(warm):
        bench.step()
    before, began = [row.tokens for row in rows], bench.now
    for _ in range(steps - warm):
        bench.step()
    took = (bench.now - began) / plain
    gained = [row.tokens - old for row, old in zip(rows, before, strict=True)]
    return Outcome(
        ratio=sum(gained) / len(rows) / took,
        learning=began / plain - sum(before) / len(rows),
        slowest=min(gained) / took,
    )


def reachable(device: Device, chance: float, guessing: Guessing, host: float, most: int) -> float:
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
    for _ in range(rows):
        request = new_request([1] * STREAM, max_tokens=1000)
        scheduler.end_prefill(scheduler.submit(request, 0.0))
        scheduler.add_row(request.rows[0])
    return scheduler
