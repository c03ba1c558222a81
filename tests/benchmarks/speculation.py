"""What drafts gain with a checkpoint and a drafter that is installed: tokens a second with and
without, by the number of rows that decode together. Both sides run in turn."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
PROMPT = 64
"""Tokens of a prompt."""


@dataclass(frozen=True)
class Plan:
    """What is measured, and on what."""

    model: Path
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

    def compared(self, prompts: Sequence[list[int]]) -> Result:
        """Replies to the prompts, by both engines in turn."""
        engines, reply = self.engines(self.plan.drafter), self.plan.reply
        runs = [
            [decode(engine, [Job(prompt, reply) for prompt in prompts]) for engine in engines]
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


def decode(engine: Any, jobs: Sequence[Job]) -> Run:
    requests = []
    for job in jobs:
        request = new_request(job.prompt, max_tokens=job.max_tokens)
        request.rows[0].output = TimedOutput(job)
        requests.append(request)
        engine.submit(request)
    while not engine.idle:
        engine.step()
    return Run(jobs, sum(r.drafted for r in requests), sum(r.accepted for r in requests))


def bench(plan: Plan) -> Result:
    """JSON-able. A table goes to stderr."""
    model = load_model(plan.model, plan.dtype)
    found = probe(model, model.make_cache, model.kv_layouts)
    curve = calibrate(model, model.make_cache, found).curve
    text = model.tokenizer.encode(plan.prompt.read_text(), special=False)
    setting = Setting(plan, model, found, curve, text)
    result = surroundings(plan.dtype) | size_of(model) | {"layout": found.layout}
    result["rows"] = list(rows_of(setting))
    print_rows("rows", TABLE, result["rows"])
    return result


def rows_of(setting: Setting) -> Iterator[Result]:
    plan = setting.plan
    for count in plan.rows:
        dice = np.random.default_rng(count)
        starts = dice.integers(0, max(1, len(setting.text) - PROMPT), count)
        prompts = [list(setting.text[at : at + PROMPT]) for at in starts]
        found = setting.compared(prompts)
        found["ratio"] = against(found["ratio"], FLOOR, at_least=True)
        yield {"rows": count, "drafter": plan.drafter} | found


TABLE = {
    "rows": "rows",
    "drafter": "drafter",
    "tok/s without": "plain",
    "with": "drafted",
    "ratio": "ratio",
    "accepted": "held",
    "same tokens": "same_tokens",
}
