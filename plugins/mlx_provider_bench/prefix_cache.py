"""`mlx-provider bench prefix`: what a stored prefix saves, in time to first token and over a
conversation. A prompt with a new salt finds no prefix: it is cold. Greedy replies with stored
prefixes are compared with cold ones."""

import base64
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from mlx_provider.commands import EngineClient, folder_of, separate_engine

from .model_speed import SAMPLE, Answer, Messages, ask, document, question
from .report import Result, print_rows, surroundings

IMAGE_EDGE = 448
REPLY = 6  # most tokens
TRIALS = 12  # runs of each kind of hit
ALL_COLD = 4096  # prompt tokens up to which every kind of hit is compared with its own cold run
QUESTION = "Which colour is the circle?"
Report = Callable[[str], None]
Turns = Sequence[tuple[str, str]]  # question and answer of each
_TTFT = {  # tables: heading -> key of a row
    "model": "model",
    "tokens": "prompt_tokens",
    "cold s": "cold_seconds",
    "repeat s": "repeat_seconds",
    "cold/repeat": "cold_over_repeat",
    "cold/turn": "next_turn.cold_over_hit",
    "cold/other": "other_question.cold_over_hit",
    "other computed": "other_question.computed",
    "equal": "same_answers",
}
_TALK = {"model": "model", "cold/cached": "cold_over_cached", "equal": "same_answers"}


@dataclass(frozen=True)
class Plan:
    """What to measure: each model with each prompt length, and the last one in a conversation."""

    models: Sequence[str] = ("demo", "demo-hybrid", "demo+image")
    """Folders, or models of the package; `+image`: with an image before the document."""
    sizes: Sequence[int] = (1024, 4096, 16_384)  # tokens of a prompt
    document: int = 17_000  # tokens of the conversation's document
    turns: int = 6


class Subject:
    """A model in an engine. `image`: prompts begin with one. `ask_cold` uses no stored prefix."""

    def __init__(self, engine: EngineClient, model: str, *, image: bool) -> None:
        self._engine, self._model, self._image = engine, model, image
        self._salts = count()
        self._tokens_per_word = ask(engine, model, question("sample", SAMPLE), 2).prompt / SAMPLE

    def messages(self, tokens: int, asked: str, turns: Turns = ()) -> Messages:
        """A document of about so many tokens, earlier turns, and the question `asked`."""
        opening: Any = document(f"document {tokens}", round(tokens / self._tokens_per_word))
        if self._image:
            opening = [_picture(tokens), {"type": "text", "text": opening}]
        texts = [opening, "I have read it.", *(text for turn in turns for text in turn), asked]
        roles = ("user", "assistant")
        return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]

    def ask(self, messages: Messages) -> Answer:
        return ask(self._engine, self._model, messages, REPLY)

    def ask_cold(self, messages: Messages) -> Answer:
        return ask(self._engine, self._model, messages, REPLY, f"cold {next(self._salts)}")


def _picture(seed: int) -> dict[str, Any]:
    from PIL import Image

    pixels = random.Random(seed).randbytes(3 * IMAGE_EDGE**2)  # noqa: S311
    written = io.BytesIO()
    Image.frombytes("RGB", (IMAGE_EDGE, IMAGE_EDGE), pixels).save(written, "PNG")
    url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def bench(plan: Plan, report: Report) -> Result:
    """Measure as planned. Returns values for JSON; `report` gets lines of progress, stderr tables.
    Raises the errors of finding and loading a model, and of the engine."""
    result = surroundings("of the checkpoint") | {"ttft": [], "conversation": []}
    total = len(plan.models) * len(plan.sizes)
    for given in plan.models:
        path = given.removesuffix("+image")
        folder, name = str(folder_of(path)), Path(given).name
        report(f"{name}: an engine starts, loads the model and times its passes")
        with separate_engine() as (engine, _):
            subject = Subject(engine, folder, image=path != given)
            for size in plan.sizes:
                which = f"{len(result['ttft']) + 1} of {total}"
                report(f"{which}: {name}, prompts of {size:,} tokens: cold, then repeated")
                row = {"model": name, **_first_tokens(subject, size)}
                result["ttft"].append(row)
                report(
                    f"{which}: first token after {row['cold_seconds']:.3g} s cold, "
                    f"{row['repeat_seconds']:.3g} s repeated; equal answers: {row['same_answers']}"
                )
            if given == plan.models[-1]:
                talk = {"model": name, **_conversation(subject, plan, report)}
                result["conversation"].append(talk)
    print_rows("time to first token", _TTFT, result["ttft"])
    print_rows("conversation", _TALK, result["conversation"])
    return result


def _first_tokens(subject: Subject, size: int) -> Result:
    """One row of the first table. Ratios compare medians, because on a busy machine the fastest of
    a few runs says less. Of the two cold runs, the faster counts."""
    first = subject.ask(subject.messages(size, QUESTION))
    questions = [f"And what is the weather {i} like in Paris today?" for i in range(TRIALS)]
    turns = [subject.messages(size, asked, [(QUESTION, first.text)]) for asked in questions]
    others = [subject.messages(size, asked) for asked in questions]
    repeats = [subject.ask(subject.messages(size, QUESTION)) for _ in range(TRIALS)]
    next_turns = [subject.ask(messages) for messages in turns]
    other_questions = [subject.ask(messages) for messages in others]
    cold_turn = subject.ask_cold(turns[0])
    cold, repeat = min(first.first, cold_turn.first), median(one.first for one in repeats)
    pairs = [*((one, first) for one in repeats), (next_turns[0], cold_turn)]
    if size <= ALL_COLD:  # a third cold run of a longer prompt would cost too much
        pairs.append((other_questions[0], subject.ask_cold(others[0])))
    return {
        "prompt_tokens": first.prompt,
        "cold_seconds": cold,
        "repeat_seconds": repeat,
        "repeat_cached": repeats[0].cached,
        "cold_over_repeat": round(cold / repeat, 2),
        "next_turn": _hit(next_turns, cold),
        "other_question": _hit(other_questions, cold),
        "same_answers": f"{sum(a.text == b.text for a, b in pairs)}/{len(pairs)}",
    }


def _hit(runs: Sequence[Answer], cold: float) -> Result:
    """What these runs found in the prefix cache. `cold`: seconds to the first token without it."""
    first = median(one.first for one in runs)
    return {
        "cached": runs[0].cached,
        "computed": runs[0].prompt - runs[0].cached,
        "seconds": first,
        "cold_over_hit": round(cold / first, 2),
    }


def _conversation(subject: Subject, plan: Plan, report: Report) -> Result:
    runs: list[tuple[Answer, Answer]] = []
    turns, asked = list[tuple[str, str]](), QUESTION
    for turn in range(plan.turns):
        report(f"conversation: turn {turn + 1} of {plan.turns}")
        messages = subject.messages(plan.document, asked, turns)
        cached, cold = subject.ask(messages), subject.ask_cold(messages)
        runs.append((cached, cold))
        report(f"first token after {cold.first:.3g} s cold, {cached.first:.3g} s with the cache")
        turns.append((asked, cold.text))
        asked = f"And what about the square, in turn {turn + 2}?"
    later = runs[1:]
    gain = sum(cold.first for _, cold in later) / sum(cached.first for cached, _ in later)
    return {
        "prompt_tokens": [cached.prompt for cached, _ in runs],
        "cached_tokens": [cached.cached for cached, _ in runs],
        "cached_seconds": [cached.first for cached, _ in runs],
        "cold_seconds": [cold.first for _, cold in runs],
        "cold_over_cached": round(gain, 2),
        "same_answers": f"{sum(a.text == b.text for a, b in runs)}/{len(runs)}",
    }
