"""`python tests/benchmarks engine`: our engine beside mlx-lm's BatchGenerator, in one process.

Two questions, each answered within the run: (decode) tokens per second at 1 to 32 rows of skewed
lengths, (stall) the gaps of running streams while a long prompt arrives.
The model has random weights: what is measured does not depend on them. Greedy tokens of both
sides are compared, so that a fast wrong answer does not count.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batching_subjects import BatchGeneratorSubject, Job, Ours, Subject, run
from mlx_provider.commands import load_model
from mlx_provider.records import LoadedModel
from mlx_provider_bench.report import Result, surroundings

DEFAULTS = "mlx-lm BatchGenerator, defaults"
TUNED = "mlx-lm BatchGenerator, step 256, one prompt at a time"
STEPS = 8
"""Of one turn."""
WARM = 4
"""Tokens of a stream after which its steps count as steady."""
STEADY = 64
"""Tokens that every stream has when the long prompt comes."""
STREAM = 500
"""Tokens of a stream: enough for the whole prompt to be prefilled beside it."""
ENDLESS = 30_000
"""Tokens of replies that outlast the measurement."""


@dataclass(frozen=True)
class Setting:
    model: LoadedModel
    rows: Sequence[int] = (1, 4, 8, 16, 32)
    turns: int = 40
    """That the sides take where they decode."""
    longest: int = 1024
    """Prompt of the longest of the skewed rows."""
    repeats: int = 3


def subjects(setting: Setting) -> list[Callable[[], Subject]]:
    inner = setting.model.model
    tuned = {"prefill_step_size": 256, "prefill_batch_size": 1}
    return [
        lambda: Ours(setting.model),
        lambda: BatchGeneratorSubject(inner, DEFAULTS),
        lambda: BatchGeneratorSubject(inner, TUNED, **tuned),
    ]


def prompts(seed: int, lengths: Sequence[int], vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(t) for t in rng.integers(1, vocab, n)] for n in lengths]


def skewed(count: int, longest: int) -> list[int]:
    """Prompt lengths: one long row, the others spread below it."""
    return [longest] + [max(8, longest // 16 * (1 + i % 8) // 4) for i in range(count - 1)]


def bench_decode(setting: Setting) -> Result:
    """Tokens per second with all rows decoding, at each number of rows of skewed lengths."""
    out: Result = {}
    for count in setting.rows:
        texts = prompts(count, skewed(count, setting.longest), setting.model.info.vocab_size)
        sides = [make() for make in subjects(setting)]
        replies = [start(side, texts) for side in sides]
        rates = [count / each for each in seconds_of_step(sides, setting.turns, time.perf_counter)]
        out[str(count)] = {
            "same_tokens": agreeing([[job.tokens for job in jobs] for jobs in replies]),
            "tokens_per_second": {s.name: rate for s, rate in zip(sides, rates, strict=True)},
            "ratio_to_best": rates[0] / max(rates[1:]),
        }
    return out


def agreeing(sides: list[list[list[int]]]) -> str:
    """How many rows have the same tokens on every side, as far as each side got."""
    rows = list(zip(*sides, strict=True))
    same = [len({tuple(r[: min(map(len, row))]) for r in row}) == 1 for row in rows]
    return f"{sum(same)}/{len(rows)}"


def bench_stall(setting: Setting) -> Result:
    """Gaps of four streams while a prompt of 4096 tokens arrives; the calmest of the repeats.

    `alone`: the same streams without the prompt, which is what the machine itself does.
    """
    vocab = setting.model.info.vocab_size

    def streams() -> list[Job]:
        return [Job(text, STREAM) for text in prompts(1, [64] * 4, vocab)]

    def with_prompt() -> list[Job]:
        return [*streams(), Job(prompts(2, [4096], vocab)[0], 4, after=STEADY)]

    out: dict[str, Result] = {}
    for _ in range(setting.repeats):
        alone = measure(setting, streams)
        for name, one in measure(setting, with_prompt).items():
            found = gaps_in_prefill(one) | {"alone": gaps_alone(alone[name])}
            if name not in out or found["worst_gap"] < out[name]["worst_gap"]:
                out[name] = found
    return out


def gaps_in_prefill(jobs: list[Job]) -> Result:
    """Gaps of the streams after a long prompt came last, in units of their steps before it."""
    *streams, long = jobs
    steady, after = gaps_in_steps(streams, long.submitted)
    meanwhile = [gap for at, gap in after if at <= long.times[0]]
    return spread([gap for _, gap in after]) | {
        "median_gap_in_prefill": statistics.median(meanwhile),
        "steady_step_seconds": steady,
        "long_first_token_seconds": long.first_token,
    }


def gaps_alone(jobs: list[Job]) -> Result:
    """The same of streams without a prompt, from the moment at which it would have come."""
    since = max(job.times[STEADY] for job in jobs)
    return spread([gap for _, gap in gaps_in_steps(jobs, since)[1]])


def gaps_in_steps(streams: Sequence[Job], since: float) -> tuple[float, list[tuple[float, float]]]:
    """Seconds of a steady step before `since`; when each later gap ended, and its steps."""
    pairs = [pair for job in streams for pair in zip(job.times, job.times[1:], strict=False)]
    joined = max(job.times[WARM] for job in streams)
    steady = statistics.median(b - a for a, b in pairs if joined <= a and b < since)
    return steady, [(b, (b - a) / steady) for a, b in pairs if b >= since]


def spread(gaps: Sequence[float]) -> Result:
    """Of gaps, in steps."""
    return {
        "worst_gap": max(gaps),
        "p99_gap": float(np.quantile(gaps, 0.99)),
        "median_gap": statistics.median(gaps),
    }


def start(subject: Subject, texts: Sequence[list[int]]) -> list[Job]:
    """Step until all of these prompts decode; returns their endless replies."""
    jobs = [Job(text, ENDLESS) for text in texts]
    for job in jobs:
        subject.submit(job)
    while any(len(job.tokens) < 2 for job in jobs):
        subject.step()
    return jobs


def seconds_of_step(
    sides: Sequence[Subject], turns: int, clock: Callable[[], float]
) -> list[float]:
    """Seconds of `clock` that a step of each side takes: of its turns the median.

    The sides take turns of a few steps, so that a machine that drifts does so for all of them. A
    turn ends when the device has done what was launched in it.
    """
    import mlx.core as mx

    spent: list[list[float]] = [[] for _ in sides]
    for _ in range(turns):
        for side, own in zip(sides, spent, strict=True):
            began = clock()
            for _ in range(STEPS):
                side.step()
            mx.synchronize()
            own.append((clock() - began) / STEPS)
    return [statistics.median(own) for own in spent]


def measure(setting: Setting, jobs: Callable[[], list[Job]]) -> dict[str, list[Job]]:
    """Run the same jobs on every subject, one after the other."""
    runs: dict[str, list[Job]] = {}
    for make in subjects(setting):
        subject = make()
        run(subject, [Job([1, 2, 3, 4], 4)])
        runs[subject.name] = run(subject, jobs())
    return runs


def sizes(hidden: int, layers: int) -> Result:
    """Config of a random model of that width and depth: eight heads, in a wider model of up to the
    128 values that real ones have."""
    width = min(128, max(32, hidden // 8))
    heads = max(2, hidden // width)
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width,
        "vocab_size": 4000,
        "max_position_embeddings": 40960,
    }


PARTS: dict[str, Callable[[Setting], Result]] = {"decode": bench_decode, "stall": bench_stall}


def bench(parts: Sequence[str], dtype: str, hidden: int, layers: int) -> Result:
    """Run the named parts on a fresh random model; JSON-able."""
    from tiny import build

    with tempfile.TemporaryDirectory() as folder:
        path = build(Path(folder) / "model", "qwen3", **sizes(hidden, layers))
        setting = Setting(load_model(path, dtype))
        results = {part: PARTS[part](setting) for part in parts}
    about = {"weights_bytes": setting.model.info.weights_bytes}
    return surroundings(dtype) | about | results
