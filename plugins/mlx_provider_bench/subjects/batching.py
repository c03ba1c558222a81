"""Our engine as a server runs it, for measurements."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from mlx_provider.commands import EngineSettings
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.execution.calibration import calibrate
from mlx_provider.engine.execution.probe import Probe
from mlx_provider.engine.scheduling.chunking import GRID
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.records import LoadedModel
from mlx_provider.testing.driver import TokenOutput, new_engine

WIDE = 2**50
"""A memory budget that never matters here."""


@dataclass(eq=False)
class Job:
    """Times in seconds of one clock."""

    prompt: list[int]
    max_tokens: int
    arrives: float = 0.0
    after: int = 0
    """Tokens that every job before it must have when it arrives."""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    submitted: float = 0.0

    @property
    def first_token(self) -> float:
        return self.times[0] - self.submitted

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class TimedOutput(TokenOutput):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def push(self, token: int, logprob: Any = None) -> list[Any]:
        self.job.tokens.append(token)
        self.job.times.append(time.perf_counter())
        return []


def server_engine(
    model: LoadedModel, found: Probe, *, costs: Costs | None = None, **more: Any
) -> Engine:
    """With the limits of a server, and memory without end; measures its passes unless `costs` are
    known."""
    s = EngineSettings()
    return new_engine(
        model,
        layout=found.layout,
        mixes=found.mixes,
        costs=costs or Costs(calibrate(model, model.make_cache, found)[0]),
        grid=GRID if found.memory.recurrent else 1,
        max_chunk=s.max_chunk,
        max_rows=s.max_rows,
        reserve=s.output_reserve,
        available=lambda: WIDE,
        **more,
    )
