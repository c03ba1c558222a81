"""Our engine and mlx-lm's BatchGenerator with one interface, for measurements."""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_provider.commands import EngineSettings
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.scheduling.chunking import GRID
from mlx_provider.engine.scheduling.costs import Costs
from mlx_provider.records import LoadedModel
from mlx_provider.serving.calibration import calibrate
from mlx_provider.serving.probe import Probe, probe
from mlx_provider.testing.driver import TokenOutput, new_engine, new_request
from unpatched import Unpatched

WIDE = 2**50
"""A memory budget that never matters here."""


def server_engine(model: LoadedModel, found: Probe) -> Engine:
    """With the limits of a server, and memory without end; measures its passes."""
    s = EngineSettings()
    return new_engine(
        model,
        layout=found.layout,
        mixes=found.mixes,
        costs=Costs(calibrate(model, model.make_cache, found).curve),
        grid=GRID if found.memory.recurrent else 1,
        max_chunk=s.max_chunk,
        max_rows=s.max_rows,
        reserve=s.output_reserve,
        available=lambda: WIDE,
    )


@dataclass(eq=False)
class Job:
    """Times in seconds of one clock."""

    prompt: list[int]
    max_tokens: int
    after: int = 0
    """Tokens that every job before it must have when it arrives."""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    submitted: float = 0.0

    @property
    def first_token(self) -> float:
        return self.times[0] - self.submitted


class TimedOutput(TokenOutput):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job

    def push(self, token: int, logprob: Any = None) -> list[Any]:
        self.job.tokens.append(token)
        self.job.times.append(time.perf_counter())
        return []


class Subject(Protocol):
    """A batching engine under measurement."""

    name: str

    def submit(self, job: Job) -> None: ...

    def step(self) -> None:
        """Advance once; new tokens go into their jobs with the time they were seen."""

    @property
    def idle(self) -> bool: ...


class Ours:
    """`mlx_provider`'s engine as a server runs it, without text."""

    def __init__(self, model: LoadedModel) -> None:
        found = probe(model, model.make_cache, model.kv_layouts)
        self.name = f"mlx-provider ({found.layout})"
        self.engine = server_engine(model, found)

    def submit(self, job: Job) -> None:
        request = new_request(job.prompt, max_tokens=job.max_tokens)
        request.rows[0].output = TimedOutput(job)
        self.engine.submit(request)

    def step(self) -> None:
        self.engine.step()

    @property
    def idle(self) -> bool:
        return self.engine.idle


class BatchGeneratorSubject:
    """mlx-lm's BatchGenerator (0.32.2), greedy, with upstream's own functions."""

    def __init__(self, model: Any, name: str, **options: Any) -> None:
        from mlx_lm.generate import BatchGenerator

        self.name = name
        self._unpatched = Unpatched(model)
        self._generator = BatchGenerator(model, max_tokens=1_000_000, **options)
        self._jobs: dict[int, Job] = {}

    def submit(self, job: Job) -> None:
        (uid,) = self._generator.insert([list(job.prompt)], [job.max_tokens])
        self._jobs[uid] = job

    def step(self) -> None:
        with self._unpatched:
            _, responses = self._generator.next()
        now = time.perf_counter()
        for response in responses:
            job = self._jobs[response.uid]
            job.tokens.append(response.token)
            job.times.append(now)
            if response.finish_reason:
                del self._jobs[response.uid]

    @property
    def idle(self) -> bool:
        return not self._jobs


def run(subject: Subject, jobs: list[Job]) -> list[Job]:
    """Submit jobs when those before them have the tokens that they wait for; step until all end."""
    waiting = list(jobs)
    while waiting or not subject.idle:
        while waiting and all(len(job.tokens) >= waiting[0].after for job in jobs if job.submitted):
            job = waiting.pop(0)
            job.submitted = time.perf_counter()
            subject.submit(job)
        subject.step()
    return jobs
