"""The engine's decisions in fixed schedules equal the recorded ones: admissions, rows of a pass,
chunks, drafts and preemptions.

`PYTHONPATH=tests/support python tests/engine/test_decisions.py` writes the traces again.
"""

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider import LoadOptions, MediaSpan, PrefillChunk
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import PrefillJob, Request, Row
from mlx_provider.engine.scheduling.scheduler import Scheduler
from mlx_provider.engine.scheduling.step import StepPlan, StepRecord
from mlx_provider.engine.speculation.policy import Asks
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.driver import Alternating, new_engine, output_of
from schedules import Arrival, guessing, request_of, tiny_tokens
from tiny import build
from wrapped_model import WrappedModel

TRACES = Path(__file__).parents[1] / "data" / "decisions"
STEP_SECONDS = 0.02
LAST = 2000
VOCAB, FIRST, WORDS = 384, 20, 340


@dataclass(frozen=True)
class Case:
    """One schedule and the engine that runs it."""

    seed: int
    requests: int = 8
    layout: str = "grouped"
    mixes: bool = True
    cached: bool = False
    guessed: float | None = None
    available: int = 2**40
    fails: frozenset[int] = frozenset()
    """Numbers of the passes over rows that fail."""
    images: bool = False
    seconds: float | None = None
    """Time limit of every third request."""
    scheduler: type[Scheduler] = Alternating


CASES = {
    "grouped": Case(1),
    "merged": Case(2, layout="merged", mixes=False),
    "solo": Case(3, scheduler=Scheduler, layout="solo", mixes=False),
    "prefix_cache": Case(4, scheduler=Scheduler, cached=True),
    "drafts": Case(5, guessed=0.7),
    "drafts_cached_solo_prompts": Case(6, guessed=0.9, mixes=False, cached=True),
    "memory": Case(7, scheduler=Scheduler, available=260),
    "memory_drafts": Case(8, available=300, guessed=0.8, cached=True),
    "failures": Case(9, fails=frozenset({6, 7, 15, 31})),
    "failures_drafts": Case(10, fails=frozenset({4, 9}), guessed=0.8, cached=True),
    "failures_memory": Case(
        11, scheduler=Scheduler, fails=frozenset({8, 20}), available=280, mixes=False
    ),
    "images": Case(12, images=True, cached=True),
    "time_limits": Case(13, scheduler=Scheduler, seconds=0.3),
}


@dataclass
class Unsteady(WrappedModel):
    """A model whose decode passes with given numbers fail, and whose image features are zeros.

    The next token depends only on the last token and its position, not on the device's rounding.
    """

    fails: frozenset[int] = frozenset()
    passes: int = 0

    def embed(self, span: MediaSpan) -> Any:
        return mx.zeros(1)

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        last = mx.array([chunk.prompt.tokens[chunk.stop - 1]])
        return (0 * self.inner.prefill(chunk) + following(last, mx.array([chunk.stop - 1])))[0]

    def decode(
        self, tokens: mx.array, cache: Any, places: mx.array, wanted: mx.array | None = None
    ) -> mx.array:
        self.passes += 1
        if self.passes in self.fails:
            raise RuntimeError("[metal] command buffer failed")
        given = (cache, places) if wanted is None else (cache, places, wanted)
        logits = 0 * self.inner.decode(tokens, *given)
        if wanted is not None:
            tokens, places = tokens[wanted], places[wanted]
        return logits + following(tokens, places)


def following(tokens: mx.array, places: mx.array) -> mx.array:
    """Logits (B, vocab) with one clear maximum per row."""
    chosen = FIRST + (7 * tokens + 13 * places) % WORDS
    return 20.0 * (mx.arange(VOCAB) == chosen[:, None])


@dataclass
class Trace:
    """Decisions in order."""

    lines: list[str] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)
    """Of requests."""

    def add(self, line: str) -> None:
        self.lines.append(line)

    def name(self, row: Row) -> str:
        return f"{self.numbers[id(row.request)]}.{row.index}"

    def planned(self, plan: StepPlan) -> None:
        line = "plan " + (" ".join(map(self.name, plan.rows)) or "-")
        if plan.chunk is not None:
            way = "mixed" if plan.mixed else "apart"
            number = self.numbers[id(plan.chunk.job.request)]
            line += f" | {number}[{plan.chunk.start}:{plan.chunk.stop}] {way}"
        if plan.rows or plan.chunk is not None:
            self.add(line)


def traced(
    trace: Trace, scheduler: type[Scheduler], made: Callable[[StepRecord], None]
) -> type[Scheduler]:
    """A scheduler that records its decisions."""

    class Traced(scheduler):  # type: ignore[misc, valid-type]
        def schedule(self, now: float, **more: Any) -> StepRecord:
            before = self.state()
            record = super().schedule(now, **more)
            assert self.state() == before, "deciding changes nothing"
            assert super().schedule(now, **more) == record
            for row in record.to_preempt:
                trace.add(f"preempt {trace.name(row)}")
            if record.to_admit is not None:
                trace.add(f"admit {trace.numbers[id(record.to_admit.request)]}")
            trace.planned(record.plan)
            made(record)
            return record

        def state(self) -> list[dict[str, int]]:
            """Which objects the prompts and rows refer to."""
            rows = [row for job in self.waiting for row in job.rows]
            every = [self, *self.waiting, *rows, *(row.request for row in rows), *self.running]
            return [{name: id(value) for name, value in vars(each).items()} for each in every]

        def retry_rows(self, rows: Any) -> list[PrefillJob]:
            trace.add("retry " + " ".join(map(trace.name, rows)))
            return super().retry_rows(rows)

    return Traced


def arrivals_of(case: Case) -> list[Arrival]:
    rng = random.Random(case.seed)
    return [
        Arrival(
            step=rng.randint(0, 20),
            length=rng.choice([1, 2, 7, 19, 75, 140]),
            word=rng.randint(0, 3),
            max_tokens=rng.randint(1, 30),
            n=rng.choice([1, 1, 1, 2]),
            kind=rng.choice([0, 0, 1, 2]),
            cancel_after=rng.choice([None, None, None, rng.randint(0, 20)]),
            fails_at=rng.choice([None, None, None, rng.randint(0, 10)]),
        )
        for _ in range(case.requests)
    ]


def requests_of(case: Case, arrivals: Sequence[Arrival]) -> list[Request]:
    requests = [request_of(each, tiny_tokens(each)) for each in arrivals]
    for at, (request, arrival) in enumerate(zip(requests, arrivals, strict=True)):
        if case.images and arrival.length > 60:
            spans = [MediaSpan(20, 50, f"image {at % 2}", None)]
            request.prompt = replace(request.prompt, spans=spans)
        if case.seconds is not None and at % 3 == 0:
            request.deadline = STEP_SECONDS * arrival.step + case.seconds
    return requests


def trace_of(
    model: TextModel, case: Case, made: Callable[[StepRecord], None] = lambda record: None
) -> list[str]:
    """Decisions of a schedule, then the result of each request. `made`: called with each record."""
    arrivals = arrivals_of(case)
    requests = requests_of(case, arrivals)
    trace, step = Trace(numbers={id(request): at for at, request in enumerate(requests)}), [0]
    speculation = (
        None if case.guessed is None else guessing(Unsteady(model), requests, case.guessed)
    )  # type: ignore[arg-type]
    if speculation is not None:
        speculation.propose = written(trace, speculation.propose)  # type: ignore[method-assign]
    engine = new_engine(
        Unsteady(model, case.fails),  # type: ignore[arg-type]
        layout=case.layout,
        mixes=case.mixes,
        scheduler=traced(trace, case.scheduler, made),
        max_chunk=32,
        reserve=4,
        available=lambda: case.available,
        prefix_cache=PrefixCache(budget=lambda: 2**24) if case.cached else None,
        in_place=False,  # memory is counted in tokens here
        speculation=speculation,
        clock=lambda: STEP_SECONDS * step[0],
    )
    last = max(a.step + (a.cancel_after or 0) for a in arrivals)
    while step[0] <= last or not engine.idle:
        for arrival, request in zip(arrivals, requests, strict=True):
            if arrival.step == step[0]:
                engine.submit(request)
            if arrival.cancel_after is not None and arrival.step + arrival.cancel_after == step[0]:
                engine.cancel(request)
        engine.step()
        step[0] += 1
        assert step[0] < LAST
    return trace.lines + [line for at, request in enumerate(requests) for line in got(at, request)]


def written(
    trace: Trace, propose: Callable[[Mapping[Row, Asks]], Any]
) -> Callable[[Mapping[Row, Asks]], Any]:
    def call(wanted: Mapping[Row, Asks]) -> Any:
        if wanted:
            counts = {trace.name(row): sum(n for _, n in asks) for row, asks in wanted.items()}
            trace.add("draft " + " ".join(f"{name}:{n}" for name, n in counts.items()))
        return propose(wanted)

    return call


def got(at: int, request: Request) -> list[str]:
    return [
        f"got {at}.{row.index} {row.finish}: {' '.join(map(str, output_of(request, i).tokens))}"
        for i, row in enumerate(request.rows)
    ]


@pytest.mark.parametrize("name", CASES)
def test_decisions_equal_the_recorded_ones(qwen3: TextModel, name: str) -> None:
    recorded = (TRACES / f"{name}.txt").read_text().splitlines()
    assert trace_of(qwen3, CASES[name]) == recorded


def test_step_records_equal_the_traced_admissions_preemptions_and_passes(qwen3: TextModel) -> None:
    made: list[StepRecord] = []
    lines = trace_of(qwen3, CASES["memory_drafts"], made.append)
    assert sum(each.to_admit is not None for each in made) == begin(lines, "admit")
    assert sum(len(each.to_preempt) for each in made) == begin(lines, "preempt") > 0
    ran = sum(bool(each.plan.rows or each.plan.chunk) for each in made)
    assert 0 < ran <= begin(lines, "plan"), "rows may end with the tokens that drafts need"
    assert any(each.plan.mixed for each in made)


def begin(lines: Sequence[str], kind: str) -> int:
    return sum(line.startswith(f"{kind} ") for line in lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tiny = load_text(build(Path(folder) / "qwen3", "qwen3"), LoadOptions())
    for each, case in CASES.items():
        (TRACES / f"{each}.txt").write_text("\n".join(trace_of(tiny, case)) + "\n")
