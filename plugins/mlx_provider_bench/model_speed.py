"""`mlx-provider bench MODEL`: time to first token and tokens per second. Each row of the result is
a prompt length and a number of streams. Its prompts are sent twice: the first round computes them
and one token, the second finds them in the prefix cache and decodes."""

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

SAMPLE = 200  # words of the prompt from which tokens per word are measured
SHORTEST = 0.02  # seconds of decoding below which a reply says nothing about its rate
ORDER = "Tell me a long story in which all of these words are."
WORDS = (
    "the quick brown fox asks lazy dog what weather in Paris is like today hello there how are "
    "you fine thank and your name an assistant answer question which colour circle image red "
    "square blue triangle green"
).split()
WARMING = 4  # tokens of a first answer, which compiles kernels for new shapes
_TABLE = {  # heading -> key of a row
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
    """What to measure: every number of streams with every prompt length."""

    model: str
    streams: Sequence[int] = (1, 4, 8)
    prompts: Sequence[int] = (1_000, 8_000, 32_000)  # tokens
    reply: int = 128  # most tokens


@dataclass(frozen=True)
class Answer:
    """The reply to one request. Times are in seconds since it was sent."""

    first: float  # until the first text; until the end if there was none
    total: float
    tokens: int  # of the reply
    prompt: int  # tokens
    failure: str = ""  # why the engine refused the request; empty: it did not
    cached: int = 0  # tokens of the prompt from the prefix cache
    text: str = ""

    @property
    def pace(self) -> float:
        """Tokens per second after the first token."""
        return (self.tokens - 1) / max(1e-9, self.total - self.first)


Ask = Callable[[Sequence[Messages], int], list[Answer]]
"""(prompts, most tokens of each reply) -> the answers in order. Sends all prompts at once."""


def bench(plan: Plan, report: Callable[[str], None]) -> Result:
    """Measure as planned. `report` gets lines of progress, stderr a table. A row that the engine
    refuses has the reason in `failed`. Raises the errors of finding and loading the model."""
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
                row = measure_row(together, asked, tokens, plan.reply)
                report(f"{which}: {_summary(row)}")
                result["rows"].append(row)
    print_rows(f"{plan.model}, {result['device']}", _TABLE, result["rows"])
    return result


def _summary(row: Result) -> str:
    if why := row.get("failed"):
        return f"refused: {why}"
    known = {name: row[key] for name, key in list(_TABLE.items())[2:] if row.get(key) is not None}
    return ", ".join(f"{name}: {cell(value)}" for name, value in known.items())


def measure_row(ask: Ask, asked: Sequence[Messages], tokens: int, reply: int) -> Result:
    """One row of the result, for the prompts `asked`, planned with so many `tokens` each, and of
    replies of at most `reply` tokens. In seconds, tokens, and tokens per second. `pace` (of one
    stream) and `rate` (of all) are `None` if the replies are too short."""
    computed = ask(asked, 1)
    decoded = computed if first_failure(computed) else ask(asked, reply)
    row: Result = {"prompt": tokens, "streams": len(asked)}
    if why := first_failure(decoded):
        return row | {"failed": why}
    timed = [answer for answer in decoded if answer.tokens > 1]
    paces = [answer.pace for answer in timed if answer.total - answer.first >= SHORTEST]
    sizes, times = [one.prompt for one in computed], [one.total for one in computed]
    return row | {
        "prompt": round(median(sizes)),
        "first_token": median(times),
        "prompt_rate": sum(sizes) / max(times),
        "pace": median(paces) if paces else None,
        "rate": sum(paces) if paces else None,
    }


def ask_together(
    engine: EngineClient, model: str, prompts: Sequence[Messages], max_tokens: int
) -> list[Answer]:
    """Send all prompts at once. Answers in order; that of a refused request has a `failure`."""

    def ask_one(messages: Messages) -> Answer:
        try:
            return ask(engine, model, messages, max_tokens)
        except MLXProviderError as error:
            return Answer(0, 0, 0, 0, failure=error.message[:200])

    pool = ThreadPoolExecutor(len(prompts))
    try:
        return list(pool.map(ask_one, prompts))
    finally:  # a signal ends the wait at once; the requests end with their engine
        pool.shutdown(wait=False, cancel_futures=True)


def ask(
    engine: EngineClient, model: str, messages: Messages, max_tokens: int, salt: str | None = None
) -> Answer:
    """The greedy reply to one prompt. Prompts with different `salt` share no prefix. Raises the
    errors of the engine."""
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
    """Why a request was refused; empty: none was."""
    return next((answer.failure for answer in answers if answer.failure), "")


def document(name: str, words: int) -> str:
    """A text of so many random words, which depend on `name`."""
    dice = random.Random(name)  # noqa: S311
    return " ".join(dice.choice(WORDS) for _ in range(words))


def question(name: str, words: int) -> Messages:
    """A prompt that begins with such a document and demands a long reply."""
    return [{"role": "user", "content": f"{document(name, words)}. {ORDER}"}]
