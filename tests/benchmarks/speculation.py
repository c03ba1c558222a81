"""What drafts gain, and that they cost nothing where they do not.

(rows) tokens a second with and without, by the number of rows and the share of drafts that hold:
on a random model the drafter knows the plain answers and is wrong as often as it is told, so that
the machinery is measured apart from any model's luck; on a checkpoint (`--model`) a real drafter
guesses. (sources) tokens a pass of each drafter alone and of all together, see `draft_sources`.
(newcomer) the first token of a prompt that comes while others decode with drafts.
(rewrite) prompt lookup while a file is written again, some of its words changed. (curves) the
policy on the curves of devices, in simulation; no figure of it depends on this machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batch_generator import MODEL, agreeing, sizes, skewed
from batching_subjects import Job, TimedOutput
from mlx_provider.commands import load_model
from mlx_provider.engine.execution.calibration import calibrate
from mlx_provider.engine.execution.probe import Probe, probe
from mlx_provider.engine.request import Request
from mlx_provider.engine.scheduling.costs import Costs, Curve
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.errors import MLXProviderError
from mlx_provider.protocol.requests import ModelOptions
from mlx_provider.records import Drafting, LoadedModel
from mlx_provider.records.extensions import MOST_DRAFTS
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider.testing.driver import new_request
from mlx_provider_bench.prefix_cache import server_engine
from mlx_provider_bench.report import Result, against, print_rows, size_of, surroundings
from schedules import Oracle

FLOOR = 0.97
"""Times the plain rate that no width may fall below."""
GAIN = 1.3
"""The same of one row of whose drafts 0.7 hold."""
FIRST_TOKEN = 1.2
"""Times as late as without drafts that a newcomer's first token may be."""
LOOKUP = 2.0
"""Times the plain rate of a file that is written again."""
ALIKE, LONGEST = 64, 512
"""Tokens of prompts of one length, and of the longest of unlike ones."""
STREAMS = 4
"""Rows that decode while another one comes."""
EDITED = 40
"""Tokens of a file of which one is changed."""
TURN = 16
"""Steps of one side until the other has its turn."""
JOINED = 4
"""Tokens of each row from which on all decode."""
STEPS = 1000
"""Of a simulation; the first half is not counted."""
SHARES = (0.0, 0.3, 0.6, 0.7, 0.8, 0.95)


@dataclass(frozen=True)
class Plan:
    """What is measured, and on what."""

    parts: Sequence[str] = ("rows", "newcomer", "rewrite", "curves", "sources")
    rows: Sequence[int] = (1, 2, 4, 8, 16)
    shares: Sequence[float] = (0.0, 0.3, 0.7, 0.95)
    """Of the oracle's drafts that hold."""
    most: int = MOST_DRAFTS
    """Drafts of a row."""
    reply: int = 192
    """Tokens of each reply."""
    rounds: int = 3
    """Measured runs of each side, after one that is not."""
    hidden: int = 256
    layers: int = 6
    dtype: str = "float32"
    model: Path | None = None
    drafter: str = "auto"
    draft_model: str | None = None
    prompt: Path | None = None
    """A text that prompts of a checkpoint are cut from; unset: this file."""


@dataclass
class Setting:
    """A loaded model, and what an engine finds out about it."""

    plan: Plan
    model: LoadedModel
    folder: Path
    registry: PluginRegistry
    found: Probe
    curve: Curve
    text: Sequence[int] = field(default_factory=list)

    def engine(self, speculation: Speculation | None, **more: Any) -> Any:
        costs = Costs(self.curve)
        return server_engine(self.model, self.found, costs=costs, speculation=speculation, **more)

    def oracle(self, share: float, answers: Sequence[Job]) -> Oracle:
        oracle = Oracle(share, self.model.info.vocab_size)
        for job in answers:
            oracle.learn([*job.prompt, *job.tokens])
        return oracle

    def speculation(self, drafting: Drafting, clock: Clock | None = None) -> Speculation:
        return Speculation(
            Source(drafting),
            vocab=self.model.info.vocab_size,
            policy=Policy(most=self.plan.most),
            clock=clock or time.perf_counter,
        )

    def drafting(self, name: str, clock: Clock | None = None) -> Speculation:
        """Speculation with a drafter that is installed. Raises `MLXProviderError`."""
        options = ModelOptions(drafter=name, draft_model=self.plan.draft_model)
        found = drafts_of(self.registry, self.folder, self.model, options).speculation
        if found is None:
            raise MLXProviderError(f"no drafter can draft for {self.folder}")
        found.clock = clock or time.perf_counter
        found.policy = Policy(most=self.plan.most)
        return found

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random tokens, or where a checkpoint is measured parts of the text."""
        dice = np.random.default_rng(seed)
        if not self.plan.model:
            return [dice.integers(1, self.model.info.vocab_size, n).tolist() for n in lengths]
        starts = [int(dice.integers(0, max(1, len(self.text) - n))) for n in lengths]
        return [list(self.text[at : at + n]) for at, n in zip(starts, lengths, strict=True)]


def bench(plan: Plan) -> Result:
    """Run the named parts; JSON-able. A table of each goes to stderr."""
    result = surroundings(plan.dtype)
    with tempfile.TemporaryDirectory() as scratch:
        setting = None
        for part in plan.parts:
            if part not in ALONE and setting is None:
                setting = _setting(plan, Path(scratch))
                result |= size_of(setting.model) | {"layout": setting.found.layout}
            if part in ALONE or setting is None:
                rows = list(ALONE[part](plan))
            else:
                rows = list(PARTS[part](setting))
            result[part] = rows
            print_rows(part, TABLES[part], rows)
    return result


def _setting(plan: Plan, scratch: Path) -> Setting:
    from tiny import build

    folder = plan.model
    if folder is None:
        shape = MODEL | sizes(plan.hidden, plan.layers)
        folder = build(scratch / "model", "qwen3", **shape)
    model = load_model(folder, plan.dtype)
    found = probe(model, model.make_cache, model.kv_layouts)
    curve = calibrate(model, model.make_cache, found).curve
    source = (plan.prompt or Path(__file__)).read_text()
    text = model.tokenizer.encode(source, special=False)
    return Setting(plan, model, folder, PluginRegistry.discover(), found, curve, text)


# -- rows


def rows(setting: Setting) -> Iterator[Result]:
    """Rates with and without drafts; the sides take turns."""
    for count in setting.plan.rows:
        for kind, lengths in (("alike", [ALIKE] * count), ("unlike", skewed(count, LONGEST))):
            if count == 1 and kind == "unlike":
                continue
            prompts = setting.prompts(lengths, seed=count)
            for share, make in _speculations(setting, prompts):
                found = _compared(setting, make, prompts)
                target = GAIN if count == 1 and share is not None and share >= 0.7 else FLOOR
                found["ratio"] = against(found["ratio"], target, at_least=True)
                yield {"rows": count, "lengths": kind, "share": share} | found


def _speculations(
    setting: Setting, prompts: Sequence[list[int]]
) -> Iterator[tuple[float | None, Callable[[Clock], Speculation]]]:
    """Of the oracle with each share, or of the checkpoint's drafter."""
    if setting.plan.model is not None:
        yield None, lambda clock: setting.drafting(setting.plan.drafter, clock)
        return
    answers = _run(setting.engine(None), prompts, setting.plan.reply)
    for share in setting.plan.shares:
        oracle = setting.oracle(share, answers)
        yield share, partial(setting.speculation, oracle)


def _compared(
    setting: Setting, make: Callable[[Clock], Speculation], prompts: Sequence[list[int]]
) -> Result:
    """The same prompts without and with drafts, a few steps of each in turn; a first round, in
    which the policy learns, is not counted."""
    sides = [Side(setting), Side(setting, make)]
    rates = []
    for turn in range(1 + setting.plan.rounds):
        for side in sides:
            side.start(prompts, setting.plan.reply, counts=turn > 0)
        while all(side.together for side in sides):
            for side in sides:
                side.take_turn()
        rates.append([side.end() for side in sides])
    drafted = sides[1]
    tokens = [[job.tokens for job in side.jobs] for side in sides]
    return {
        "plain": statistics.median(a.wall for a, _ in rates[1:]),
        "drafted": statistics.median(b.wall for _, b in rates[1:]),
        "ratio": statistics.median(b.wall / a.wall for a, b in rates[1:]),
        "cpu_ratio": statistics.median(b.cpu / a.cpu for a, b in rates[1:]),
        "drafts_a_step": drafted.drafts / max(1, drafted.steps),
        "held": drafted.held / drafted.drafts if drafted.drafts else None,
        "same_tokens": agreeing(tokens),
    }


class Clock:
    """Seconds of one side: it stands still while it is another one's turn."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._spent + (0.0 if self._since is None else time.perf_counter() - self._since)

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *args: object) -> None:
        self._spent, self._since = self(), None


@dataclass(frozen=True)
class Rate:
    """Tokens a second, by the clock and by the processor."""

    wall: float
    cpu: float


class Side:
    """An engine that decodes in turn with another one."""

    def __init__(
        self, setting: Setting, make: Callable[[Clock], Speculation] | None = None
    ) -> None:
        self.clock = Clock()
        self.engine = setting.engine(None if make is None else make(self.clock), clock=self.clock)
        self.drafts = self.held = self.steps = 0
        self.jobs: list[Job] = []

    def start(self, prompts: Sequence[list[int]], reply: int, *, counts: bool) -> None:
        """Prefill, until all of them decode; from then on with drafts."""
        joining = sum(map(len, prompts))  # tokens that a row may say while others are in prefill
        self.jobs = [Job(list(prompt), joining + reply) for prompt in prompts]
        self._requests = [_submit(self.engine, job, drafts=False) for job in self.jobs]
        self._wanted = reply * len(prompts)
        self._counts = counts
        with self.clock:
            while any(len(job.tokens) < JOINED for job in self.jobs):
                self.engine.step()
        for request in self._requests:
            request.drafts = True
        self._seconds = self._cpu = 0.0
        self._before = self._tokens

    @property
    def together(self) -> bool:
        """Whether all rows still decode, and have said less than is wanted."""
        said = self._tokens - self._before
        return said < self._wanted and all(request.unfinished for request in self._requests)

    @property
    def _tokens(self) -> int:
        return sum(len(job.tokens) for job in self.jobs)

    def take_turn(self) -> None:
        import mlx.core as mx

        began, cpu = self.clock(), time.process_time()
        with self.clock:
            for _ in range(TURN):
                if self.together:
                    self.engine.step()
                    self.steps += self._counts
            mx.synchronize()
        self._seconds += self.clock() - began
        self._cpu += time.process_time() - cpu

    def end(self) -> Rate:
        """Rates of the turns; what is left of the replies is not wanted."""
        tokens = self._tokens - self._before
        if self._counts:
            self.drafts += sum(request.drafted for request in self._requests)
            self.held += sum(request.accepted for request in self._requests)
        for request in self._requests:
            self.engine.cancel(request)
        return Rate(tokens / self._seconds, tokens / self._cpu)


def _run(engine: Any, prompts: Sequence[list[int]], reply: int) -> list[Job]:
    """Decode all of them together."""
    jobs = [Job(list(prompt), reply) for prompt in prompts]
    for job in jobs:
        _submit(engine, job)
    while not engine.idle:
        engine.step()
    return jobs


def _submit(engine: Any, job: Job, **more: Any) -> Any:
    request = new_request(job.prompt, max_tokens=job.max_tokens, **more)
    request.rows[0].output = TimedOutput(job)
    engine.submit(request)
    return request


def _rate(job: Job) -> float:
    """Tokens a second, from the first to the last."""
    return (len(job.times) - 1) / (job.times[-1] - job.times[0])


# -- a newcomer


def newcomer(setting: Setting) -> Iterator[Result]:
    """Seconds until the first token of a prompt that comes while others decode."""
    streams = setting.prompts([ALIKE] * STREAMS, seed=0)
    reply = 2 * setting.plan.reply
    plain = setting.engine(None)
    oracle = setting.oracle(0.9, _run(plain, streams, reply))
    drafted = setting.engine(setting.speculation(oracle))
    _run(drafted, streams, reply)
    for length in (8, LONGEST):
        pairs = []
        for turn in range(setting.plan.rounds):
            (prompt,) = setting.prompts([length], seed=1000 * length + turn)
            pairs.append([_first_token(side, streams, reply, prompt) for side in (plain, drafted)])
        ratio = statistics.median(after / before for before, after in pairs)
        yield {
            "prompt": length,
            "plain": statistics.median(before for before, _ in pairs),
            "drafted": statistics.median(after for _, after in pairs),
            "ratio": against(ratio, FIRST_TOKEN, at_least=False),
        }


def _first_token(engine: Any, streams: Sequence[list[int]], reply: int, prompt: list[int]) -> float:
    others = [Job(list(text), reply) for text in streams]
    requests = [_submit(engine, job) for job in others]
    while any(len(job.tokens) < reply // 8 for job in others):
        engine.step()
    job = Job(prompt, 2, submitted=time.perf_counter())
    _submit(engine, job)
    while not job.times:
        engine.step()
    for request in requests:
        engine.cancel(request)
    while not engine.idle:
        engine.step()
    return job.first_token


# -- a file that is written again


def rewrite(setting: Setting) -> Iterator[Result]:
    """A text of the prompt is written again, word by word as a grammar dictates, with changes."""
    vocab = setting.model.info.vocab_size
    source = list(setting.text[: 4 * setting.plan.reply])
    written = edited(source, vocab)
    try:
        speculation = setting.drafting("lookup")
    except MLXProviderError as error:
        yield {"drafter": str(error)}
        return
    plain, drafted = setting.engine(None), setting.engine(speculation)
    pairs = []
    for _ in range(1 + setting.plan.rounds):
        before, _ = _dictated(plain, source, written, vocab)
        after, request = _dictated(drafted, source, written, vocab)
        pairs.append((_rate(before), _rate(after)))
    ratio = statistics.median(after / before for before, after in pairs[1:])
    yield {
        "drafter": "lookup",
        "tokens": len(written),
        "plain": statistics.median(rate for rate, _ in pairs[1:]),
        "drafted": statistics.median(rate for _, rate in pairs[1:]),
        "held": request.accepted / request.drafted if request.drafted else None,
        "ratio": against(ratio, LOOKUP, at_least=True),
        "same_tokens": agreeing([[written], [after.tokens]]),
    }


def edited(source: Sequence[int], vocab: int) -> list[int]:
    """The same text with a few other tokens."""
    return [
        (token + 1) % vocab if at % EDITED == EDITED - 1 else token
        for at, token in enumerate(source)
    ]


def _dictated(engine: Any, source: list[int], text: list[int], vocab: int) -> tuple[Job, Request]:
    job = Job(list(source), len(text))
    request = new_request(job.prompt, max_tokens=job.max_tokens)
    request.rows[0].output = TimedOutput(job)
    request.rows[0].constraint = Dictated(text, vocab)
    engine.submit(request)
    while not engine.idle:
        engine.step()
    return job, request


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


# -- devices that are not here


def curves(plan: Plan) -> Iterator[Result]:
    """One line for each device, drafter and number of rows: times the plain rate, by share."""
    import speculation_curves as simulated

    for name, device in simulated.DEVICES.items():
        for drafter, guessing in simulated.DRAFTERS.items():
            for count in simulated.ROWS:
                cases = _cases(count)
                found = {
                    case: simulated.simulate(device, luck, guessing, steps=STEPS)
                    for case, luck in cases.items()
                }
                yield {
                    "device": name,
                    "drafter": drafter,
                    "rows": count,
                    **{case: round(one.ratio, 3) for case, one in found.items()},
                    "slowest_row": round(min(one.slowest for one in found.values()), 3),
                    "learning_steps": round(max(one.learning for one in found.values()), 1),
                    "reachable": round(simulated.reachable(device, 0.7, guessing, 0.002, 2), 2)
                    if count == 1
                    else None,
                    "worst": against(
                        min(one.ratio for one in found.values()), FLOOR, at_least=True
                    ),
                }


def _cases(count: int) -> Mapping[str, list[Any]]:
    from speculation_curves import copying, steady, turning

    alike = {f"{share:.0%}": [steady(share)] * count for share in SHARES}
    return alike | {
        "mixed": [steady(SHARES[at % len(SHARES)]) for at in range(count)],
        "worse": [turning(0.9, 0.0, at=1500)] * count,
        "better": [turning(0.0, 0.9, at=700)] * count,
        "copied": [copying(0.95, copied=60, written=200)] * count,
    }


def sources(plan: Plan) -> Iterator[Result]:
    """One line for each text and drafter."""
    from draft_sources import compared

    return compared(plan.model, plan.reply, (plan.prompt or Path(__file__)).read_text())


ALONE: Mapping[str, Callable[[Plan], Iterator[Result]]] = {"curves": curves, "sources": sources}
"""Parts that need no model of the plan's sizes."""
PARTS: Mapping[str, Callable[[Setting], Iterator[Result]]] = {
    "rows": rows,
    "newcomer": newcomer,
    "rewrite": rewrite,
}
TABLES: Mapping[str, Mapping[str, str]] = {
    "rows": {
        "rows": "rows",
        "lengths": "lengths",
        "share": "share",
        "tok/s without": "plain",
        "with": "drafted",
        "ratio": "ratio",
        "by CPU time": "cpu_ratio",
        "drafts a step": "drafts_a_step",
        "held": "held",
        "same tokens": "same_tokens",
    },
    "newcomer": {
        "prompt": "prompt",
        "first token without, s": "plain",
        "with": "drafted",
        "ratio": "ratio",
    },
    "rewrite": {
        "drafter": "drafter",
        "tokens": "tokens",
        "tok/s without": "plain",
        "with": "drafted",
        "ratio": "ratio",
        "held": "held",
        "same tokens": "same_tokens",
    },
    "sources": {
        "text": "text",
        "drafter": "drafter",
        "tokens a pass": "per_pass",
        "held": "held",
        "same tokens": "same_tokens",
    },
    "curves": {
        "device": "device",
        "drafter": "drafter",
        "rows": "rows",
        **{f"{share:.0%}": f"{share:.0%}" for share in SHARES},
        **{case: case for case in ("mixed", "worse", "better", "copied")},
        "slowest row": "slowest_row",
        "learning": "learning_steps",
        "worst": "worst",
    },
}
