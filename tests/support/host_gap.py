"""How long a device waits for the host between two passes.

The device is imagined: each pass of the model takes a fixed time on it, a draw takes none. The host
is real: its time is the CPU time of the engine thread, and it waits where it reads tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import SamplingParams
from mlx_provider.engine.speculation.policy import Ask, Asks, Policy
from mlx_provider.testing.driver import new_engine, new_request

SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "temperature, top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
}
WARM = 8
"""Steps before those that count."""


class Three(Policy):
    """Three drafts for each row in each step."""

    def choose(self, rows: Sequence[object], others: int, seconds: object) -> list[Asks]:
        return [(Ask(0, 3),)] * len(rows)


@dataclass
class ImaginedDevice:
    """Runs launched passes one after the other."""

    seconds: float
    """Time of each pass."""
    host: Callable[[], float] = time.thread_time
    waited: float = 0.0
    """Time that the host has waited for tokens."""
    busy: float = 0.0
    """End of the last pass."""
    drawn: float = 0.0
    """End of the last pass whose tokens are drawn."""
    gaps: list[float] = field(default_factory=list)
    """Seconds without work before each pass."""

    @property
    def now(self) -> float:
        return self.host() + self.waited

    def run(self, batch: Any) -> None:
        """Run the passes of `batch` from now on."""
        forward, drawn, read = batch.forward, batch.set_drawn, batch.catch_up

        def launch(*args: Any) -> Any:
            made = forward(*args)
            self.gaps.append(max(0.0, self.now - self.busy))
            self.busy = max(self.busy, self.now) + self.seconds
            return made

        def draw(*args: Any) -> None:
            drawn(*args)
            self.drawn = max(self.busy, self.now)

        def wait_and_read() -> Any:
            self.waited += max(0.0, self.drawn - self.now)
            return read()

        batch.forward, batch.set_drawn, batch.catch_up = launch, draw, wait_and_read


def decoding(model: Any, rows: int, params: SamplingParams, steps: int) -> Engine:
    """An engine with rows that decode for at least this many steps."""
    engine = new_engine(model, max_chunk=64)
    for at in range(rows):
        engine.submit(new_request(range(5, 15 + at), max_tokens=steps + 100, params=params))
    while len(engine.scheduler.running) < rows:
        engine.step()
    return engine


def gaps(engine: Engine, device: ImaginedDevice, steps: int) -> list[float]:
    """Seconds that the device waits before each of so many passes."""
    device.run(engine.batch)
    for _ in range(WARM + steps):
        engine.step()
    return device.gaps[WARM:]
