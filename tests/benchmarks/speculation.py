"""What drafts gain with a checkpoint and a drafter that is installed.

(rows) tokens a second with and without, by the number of rows that decode together. (rewrite)
prompt lookup while a file is written again, some of its words changed. Both sides run in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batch_generator import agreeing
from batching_subjects import Job, TimedOutput, server_engine, size_of
from mlx_provider.commands import load_model
from mlx_provider.engine.execution.calibration import calibrate
from mlx_provider.engine.execution.probe import Probe, probe
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.errors import MLXProviderError
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.records import LoadedModel
from mlx_provider.records.extensions import MOST_DRAFTS
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider.testing.driver import new_request
from mlx_provider_bench.report import Result, against, print_rows, surroundings

FLOOR = 0.97
"""Times the plain rate that no number of rows may fall below."""
LOOKUP = 2.0
"""Times the plain rate of a file that is written again."""
PROMPT = 64
"""Tokens of a prompt."""
EDITED = 40
"""Tokens of a file of which one is changed."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and on what."""

    model: Path
    parts: Sequence[str] = ("rows", "rewrite")
    rows: Sequence[int] = (1, 2, 4, 8, 16)
    most: int = MOST_DRAFTS
    """Drafts of a row."""
    reply: int = 192
    """Tokens of each reply."""
    rounds: int = 3
    """Measured runs of each side, after one that is not, in which the policy learns."""
    dtype: str = "float32"
    drafter: str = "auto"
    draft_model: str | None = None
    prompt: Path = Path(__file__)
    """A text that prompts are cut from."""


@dataclass
class Setting:
    """A loaded model, and what an engine finds out about it."""

    plan: Plan
    model: LoadedModel
    found: Probe
    curve: Curve
    text: Sequence[int]

    def engines(self, drafter: str) -> list[Any]:
        """Without and with the drafter. Raises `MLXProviderError`."""
        options = ModelOptions(drafter=drafter, draft_model=self.plan.draft_model)
        registry = PluginRegistry.discover()
        speculation = drafts_of(registry, self.plan.model, self.model, options).speculation
        if speculation is None:
            raise MLXProviderError(f"no drafter can draft for {self.plan.model}")
        speculation.policy = Policy(most=self.plan.most)
        costs = [Costs(self.curve), Costs(self.curve)]
        return [
            server_engine(self.model, self.found, costs=each, speculation=drafts)
            for each, drafts in zip(costs, (None, speculation), strict=True)
        ]

    def compared(self, drafter: str, make: Any) -> Result:
        """The jobs and constraints that `make` gives, on both engines in turn."""
        runs = [
            [decode(engine, *make()) for engine in engines]
            for engines in [self.engines(drafter)]
            for _ in range(1 + self.plan.rounds)
        ]
        held = runs[-1][1].accepted / max(1, runs[-1][1].drafted)
        return {
            "plain": statistics.median(plain.rate for plain, _ in runs[1:]),
            "drafted": statistics.median(drafted.rate for _, drafted in runs[1:]),
            "ratio": statistics.median(drafted.rate / plain.rate for plain, drafted in runs[1:]),
            "held": held if runs[-1][1].drafted else None,
            "same_tokens": agreeing([[job.tokens for job in run.jobs] for run in runs[-1]]),
        }


@dataclass(frozen=True)
class Run:
    jobs: Sequence[Job]
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens a second, from the moment at which all decode."""
        began = max(job.times[0] for job in self.jobs)
        later = [at for job in self.jobs for at in job.times if at > began]
        return len(later) / (max(later) - began)


def decode(engine: Any, jobs: Sequence[Job], constraints: Sequence[Any]) -> Run:
    requests = []
    for job, constraint in zip(jobs, constraints, strict=True):
        request = new_request(job.prompt, max_tokens=job.max_tokens)
        request.rows[0].output = TimedOutput(job)
        request.rows[0].constraint = constraint
        requests.append(request)
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return Run(jobs, sum(r.drafted for r in requests), sum(r.accepted for r in requests))


def bench(plan: Plan) -> Result:
    """Run the named parts; JSON-able. A table of each goes to stderr."""
    model = load_model(plan.model, plan.dtype)
    found = probe(model, model.make_cache, model.kv_layouts)
    curve = calibrate(model, model.make_cache, found).curve
    text = model.tokenizer.encode(plan.prompt.read_text(), special=False)
    setting = Setting(plan, model, found, curve, text)
    result = surroundings(plan.dtype) | size_of(model) | {"layout": found.layout}
    for part in plan.parts:
        rows = list(PARTS[part](setting))
        print_rows(part, TABLE, rows)
        result[part] = rows
    return result


def rows(setting: Setting) -> Iterator[Result]:
    plan = setting.plan
    for count in plan.rows:
        dice = np.random.default_rng(count)
        starts = dice.integers(0, max(1, len(setting.text) - PROMPT), count)
        prompts = [list(setting.text[at : at + PROMPT]) for at in starts]
        found = setting.compared(
            plan.drafter,
            lambda prompts=prompts: ([Job(p, plan.reply) for p in prompts], [None] * len(prompts)),
        )
        found["ratio"] = against(found["ratio"], FLOOR, at_least=True)
        yield {"rows": count, "drafter": plan.drafter} | found


def rewrite(setting: Setting) -> Iterator[Result]:
    """A text of the prompt is written again, word by word as a grammar dictates, with changes."""
    vocab, source = setting.model.info.vocab_size, list(setting.text[: 4 * setting.plan.reply])
    written = [
        (token + 1) % vocab if at % EDITED == EDITED - 1 else token
        for at, token in enumerate(source)
    ]
    found = setting.compared(
        "lookup", lambda: ([Job(source, len(written))], [Dictated(written, vocab)])
    )
    found["ratio"] = against(found["ratio"], LOOKUP, at_least=True)
    yield {"rows": 1, "drafter": "lookup"} | found


@dataclass
class Dictated:
    """A grammar of one text; see `RowConstraint`."""

    text: Sequence[int]
    vocab: int
    at: int = 0

    def mask(self) -> NDArray[np.uint32]:
        bits = np.zeros(-(-self.vocab // 32), dtype=np.uint32)
        word, bit = divmod(self.text[self.at], 32)
        bits[word] = np.uint32(1) << np.uint32(bit)
        return bits

    def advance(self, token: int) -> None:
        self.at += 1

    @property
    def finished(self) -> bool:
        return self.at >= len(self.text)

    def forced(self) -> Sequence[int]:
        return ()

    def fork(self) -> Dictated:
        return replace(self)


PARTS = {"rows": rows, "rewrite": rewrite}
TABLE = {
    "rows": "rows",
    "drafter": "drafter",
    "tok/s without": "plain",
    "with": "drafted",
    "ratio": "ratio",
    "accepted": "held",
    "same tokens": "same_tokens",
}
