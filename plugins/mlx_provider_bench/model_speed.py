"""`mlx-provider bench MODEL`: time to first token and tokens per second of a model. A separate
engine process serves the model with normal drafts and limits. Each row is a prompt length and a
number of streams: one round computes the prompts and one token, the second finds them in the prefix
cache and decodes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from mlx_provider.commands import folder_of

from .report import Result, print_rows, shown, surroundings
from .servers import OURS, Answer, Client, Messages, running

SAMPLE = 200
"""Words of the prompt from which tokens per word are measured."""
SHORTEST = 0.02
"""Seconds of decoding below which a reply says nothing about its rate."""
ORDER = "Tell me a long story in which all of these words are."
"""Last, so that no two questions begin alike."""
WORDS = (
    "the quick brown fox asks lazy dog what weather in Paris is like today hello there how are "
    "you fine thank and your name an assistant answer question which colour circle image red "
    "square blue triangle green"
).split()
WARMING = 4
"""Tokens of a first answer, which compiles kernels for new shapes."""


@dataclass(frozen=True)
class Plan:
    model: str
    """A folder, a Hub repository, or a model of the package."""
    streams: Sequence[int] = (1, 4, 8)
    prompts: Sequence[int] = (1_000, 8_000, 32_000)
    """Approximate prompt tokens."""
    reply: int = 128


def bench(plan: Plan, report: Callable[[str], None]) -> Result:
    """JSON-able. `report` gets what is measured; a table goes to stderr. Raises `ModelNotFound`,
    `BadRequest`, `EngineUnavailable`, or `RequestFailed` if the model cannot be loaded. A row that
    the engine refuses has the reason in `failed`."""
    folder = folder_of(plan.model)
    result = surroundings("of the checkpoint") | {"model": plan.model, "rows": []}
    total = len(plan.streams) * len(plan.prompts)
    report(f"an engine starts, loads {plan.model} and times its passes on this device")
    with (
        tempfile.TemporaryDirectory() as scratch,
        running(OURS, folder, Path(scratch) / "engine.log") as server,
    ):
        client = Client(server)
        per_word = client.ask(question("sample", SAMPLE), 1).prompt / SAMPLE
        for count in plan.streams:
            report(f"streams: {count}; a short reply compiles kernels and is not measured")
            client.ask_together(questions("warming", count, SAMPLE), WARMING)
            for tokens in plan.prompts:
                which = f"{len(result['rows']) + 1} of {total}"
                report(f"{which}: streams: {count}, prompts of {tokens:,} tokens")
                asked = questions(f"{tokens}", count, round(tokens / per_word))
                found = row(client, asked, tokens, plan.reply)
                report(f"{which}: {_figures(found)}")
                result["rows"].append(found)
        client.close()
    print_rows(f"{plan.model}, {result['device']}", _TABLE, result["rows"])
    return result


def _figures(row: Result) -> str:
    if why := row.get("failed"):
        return f"refused: {why}"
    known = {name: row[key] for name, key in list(_TABLE.items())[2:] if row.get(key) is not None}
    return ", ".join(f"{name}: {shown(value)}" for name, value in known.items())


def row(client: Client, asked: Sequence[Messages], tokens: int, reply: int) -> Result:
    """`tokens`: of a prompt, as planned. Times are in seconds."""
    computed = client.ask_together(asked, 1)
    decoded = computed if failed(computed) else client.ask_together(asked, reply)
    found: Result = {"prompt": tokens, "streams": len(asked)}
    if why := failed(decoded):
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


def failed(answers: Sequence[Answer]) -> str:
    return next((answer.failure for answer in answers if answer.failure), "")


def questions(name: str, count: int, words: int) -> list[Messages]:
    return [question(f"{name} {count} {at}", words) for at in range(count)]


def document(name: str, words: int) -> str:
    dice = random.Random(name)  # noqa: S311
    return " ".join(dice.choice(WORDS) for _ in range(words))


def question(name: str, words: int) -> Messages:
    return [{"role": "user", "content": f"{document(name, words)}. {ORDER}"}]


_TABLE = {
    "prompt tokens": "prompt",
    "streams": "streams",
    "first token, s": "first_token",
    "prompt tokens/s": "prompt_rate",
    "tokens/s of a stream": "pace",
    "of all": "rate",
    "failed": "failed",
}
