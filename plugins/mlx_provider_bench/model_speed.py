"""`mlx-provider bench MODEL`. Each row is a prompt length and a number of streams: one round
computes the prompts and one token, the second finds them in the prefix cache and decodes."""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from mlx_provider.commands import (
    Delta,
    Done,
    EngineClient,
    GenerateRequest,
    folder_of,
    separate_engine,
)
from mlx_provider.errors import MLXProviderError

from .report import Result, cell, print_rows, surroundings

Messages = Sequence[dict[str, Any]]

SAMPLE = 200
"""Words of the prompt from which tokens per word are measured."""
SHORTEST = 0.02
"""Seconds of decoding below which a reply says nothing about its rate."""
ORDER = "Tell me a long story in which all of these words are."
WORDS = (
    "the quick brown fox asks lazy dog what weather in Paris is like today hello there how are "
    "you fine thank and your name an assistant answer question which colour circle image red "
    "square blue triangle green"
).split()
WARMING = 4
"""Tokens of a first answer, which compiles kernels for new shapes."""
_TABLE = {
    "prompt tokens": "prompt",
    "streams": "streams",
    "first token, s": "first_token",
    "prompt tokens/s": "prompt_rate",
    "tokens/s of a stream": "pace",
    "of all": "rate",
    "failed": "failed",
}


@dataclass(frozen=True)
class Plan:
    model: str
    streams: Sequence[int] = (1, 4, 8)
    prompts: Sequence[int] = (1_000, 8_000, 32_000)
    reply: int = 128


@dataclass(frozen=True)
class Answer:
    """Times in seconds since the request was sent."""

    first: float
    """Until the first text; until the end if there was none."""
    total: float
    tokens: int
    prompt: int
    failure: str = ""
    cached: int = 0
    text: str = ""

    @property
    def pace(self) -> float:
        return (self.tokens - 1) / max(1e-9, self.total - self.first)


Ask = Callable[[Sequence[Messages], int], list[Answer]]
"""Sends all prompts at once, for so many tokens each. Answers in order."""


def bench(plan: Plan, report: Callable[[str], None]) -> Result:
    """A table goes to stderr. A row that the engine refuses has the reason in `failed`. Raises the
    errors of finding and loading the model."""
    folder = folder_of(plan.model)
    result = surroundings("of the checkpoint") | {"model": plan.model, "rows": []}
    total = len(plan.streams) * len(plan.prompts)
    report(f"an engine starts, loads {plan.model} and times its passes on this device")
    with separate_engine() as (engine, _):
        together = partial(ask_together, engine, str(folder))
        per_word = ask(engine, str(folder), question("sample", SAMPLE), 1).prompt / SAMPLE
        for count in plan.streams:
            report(f"streams: {count}; a short reply compiles kernels and is not measured")
            together([question(f"warming {count} {at}", SAMPLE) for at in range(count)], WARMING)
            for tokens in plan.prompts:
                which = f"{len(result['rows']) + 1} of {total}"
                report(f"{which}: streams: {count}, prompts of {tokens:,} tokens")
                words = round(tokens / per_word)
                asked = [question(f"{tokens} {count} {at}", words) for at in range(count)]
                found = measure_row(together, asked, tokens, plan.reply)
                report(f"{which}: {_summary(found)}")
                result["rows"].append(found)
    print_rows(f"{plan.model}, {result['device']}", _TABLE, result["rows"])
    return result


def _summary(row: Result) -> str:
    if why := row.get("failed"):
        return f"refused: {why}"
    known = {name: row[key] for name, key in list(_TABLE.items())[2:] if row.get(key) is not None}
    return ", ".join(f"{name}: {cell(value)}" for name, value in known.items())


def measure_row(ask: Ask, asked: Sequence[Messages], tokens: int, reply: int) -> Result:
    """`tokens`: of a prompt, as planned. Times are in seconds."""
    computed = ask(asked, 1)
    decoded = computed if first_failure(computed) else ask(asked, reply)
    found: Result = {"prompt": tokens, "streams": len(asked)}
    if why := first_failure(decoded):
        return found | {"failed": why}
    timed = [answer for answer in decoded if answer.tokens > 1]
    paces = [answer.pace for answer in timed if answer.total - answer.first >= SHORTEST]
    sizes, times = [one.prompt for one in computed], [one.total for one in computed]
    return found | {
        "prompt": round(median(sizes)),
        "first_token": median(times),
        "prompt_rate": sum(sizes) / max(times),
        "pace": median(paces) if paces else None,
        "rate": sum(paces) if paces else None,
    }


def ask_together(
    engine: EngineClient, model: str, prompts: Sequence[Messages], max_tokens: int
) -> list[Answer]:
    def one(messages: Messages) -> Answer:
        try:
            return ask(engine, model, messages, max_tokens)
        except MLXProviderError as error:
            return Answer(0, 0, 0, 0, failure=error.message[:200])

    pool = ThreadPoolExecutor(len(prompts))
    try:
        return list(pool.map(one, prompts))
    finally:  # a signal ends the wait at once; the requests end with their engine
        pool.shutdown(wait=False, cancel_futures=True)


def ask(
    engine: EngineClient, model: str, messages: Messages, max_tokens: int, salt: str | None = None
) -> Answer:
    """Greedy. Raises the errors of the engine."""
    began, first, usage, text = time.perf_counter(), None, None, ""
    fields = {"messages": messages, "max_tokens": max_tokens, "sampling": {"temperature": 0}}
    request = GenerateRequest.model_validate({"model": model, "salt": salt, **fields})
    for event in engine.submit(request):
        if isinstance(event, Delta) and (piece := event.reasoning + event.content):
            first = time.perf_counter() - began if first is None else first
            text += piece
        usage = event.usage if isinstance(event, Done) else usage
    total = time.perf_counter() - began
    tokens, prompt = (usage.completion_tokens, usage.prompt_tokens) if usage else (0, 0)
    cached = usage.cached_tokens if usage else 0
    first = total if first is None else first
    return Answer(first, total, tokens, prompt, cached=cached, text=text)


def first_failure(answers: Sequence[Answer]) -> str:
    return next((answer.failure for answer in answers if answer.failure), "")


def document(name: str, words: int) -> str:
    dice = random.Random(name)  # noqa: S311
    return " ".join(dice.choice(WORDS) for _ in range(words))


def question(name: str, words: int) -> Messages:
    return [{"role": "user", "content": f"{document(name, words)}. {ORDER}"}]
