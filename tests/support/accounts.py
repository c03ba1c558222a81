"""How long a short prompt waits beside the prompts of another account, on curves of devices."""

from dataclasses import dataclass, field

from device_curves import HOST, MAX_CHUNK, Device
from mlx_provider.engine.request import PrefillJob
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.engine.scheduling.scheduler import Limits, Scheduler
from mlx_provider.testing.driver import TokenLedger, new_request

LONG, SHORT = 8_000, 500
"""Tokens of a prompt of the flood, and of the one that waits."""
REPLY = 200
MEMORY = 8 * (LONG + REPLY)
"""Tokens of all rows."""
WARM = 12
"""Prompts of the flood that have run before the short one comes."""


@dataclass
class Accounts:
    """A device that runs one step after the other, for requests of several accounts."""

    device: Device
    memory: int = MEMORY
    max_rows: int = 64
    now: float = 0.0
    steps: int = 0
    preempted: int = 0
    first: dict[int, float] = field(default_factory=dict)
    """When each request had its first token, by identity."""

    def __post_init__(self) -> None:
        limits = Limits(self.max_rows, 1000, 0.1, MAX_CHUNK, REPLY)
        ledger = TokenLedger(limits).give(available=lambda: self.memory)
        costs = Costs(self.device.measured())
        self.scheduler = Scheduler(ledger, costs, grid=self.device.grid)
        self._read = 0.0

    def ask(
        self, account: str, prompt: int, reply: int = REPLY, *, share: float = 1.0
    ) -> PrefillJob:
        request = new_request([1] * prompt, max_tokens=reply, account=account, share=share)
        return self.scheduler.submit(request, self.now)

    def step(self) -> None:
        """Decide and run one step; the clock is the device's."""
        scheduler, device = self.scheduler, self.device
        record = scheduler.schedule(self.now, mixes=device.mixes, stalled=self.now - self._read)
        scheduler.apply(record)
        for job in record.begins:
            job.cache = []
        self.preempted += len(record.preempted)
        plan = record.plan
        scheduler.charge_step(plan)
        chunk, rows, seconds = plan.chunk, plan.rows, HOST * record.runs
        size = chunk.size if chunk is not None else 0
        depth = chunk.start if chunk is not None else 0
        if rows:
            keys = sum(row.length for row in rows)
            mixed = (size, depth) if plan.mixed else (0, 0)
            seconds += device.seconds(len(rows), keys, *mixed)
        if chunk is not None and not plan.mixed:
            seconds += device.seconds(0, 0, size, depth)
        self.now += seconds
        self.steps += 1
        for row in rows:
            self._read = self.now
            row.tokens.append(1)
            if len(row.tokens) >= row.request.max_tokens:
                scheduler.remove_request(row.request)
        if chunk is not None:
            chunk.job.done = chunk.stop
            scheduler.charge_chunk(chunk)
            if not chunk.job.cost:
                self._joined(chunk.job)

    def _joined(self, job: PrefillJob) -> None:
        self.scheduler.end_prefill(job)
        self.first.setdefault(id(job.request), self.now)
        for row in job.rows:
            self.scheduler.add_row(row)

    def wait_of(self, job: PrefillJob) -> float:
        """Run until the prompt has its first token; the seconds since it came."""
        while id(job.request) not in self.first:
            self.step()
        return self.first[id(job.request)] - job.arrived


def wait(device: Device, others: int, account: str = "b") -> float:
    """Seconds to the first token of a short prompt of `account`, beside `others` of account "a".

    It comes in the middle of a long prompt: the only one, or after those that filled the memory.
    """
    run = Accounts(device)
    jobs = [run.ask("a", LONG) for _ in range(others)]
    while sum(job.done for job in jobs) < LONG * (min(WARM, others - 1) + 0.5):
        run.step()
    return run.wait_of(run.ask(account, SHORT))
