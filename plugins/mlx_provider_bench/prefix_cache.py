"""`mlx-provider bench prefix`: what a stored prefix saves, in time to first token and over a
conversation. Prompts of a new tenant are cold; each greedy reply is compared with a cold one."""

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
REPLY = 6
TRIALS = 12
ALL_COLD = 4096
"""Prompt tokens up to which every kind of hit is checked against its own cold run."""
QUESTION = "Which colour is the circle?"
Report = Callable[[str], None]
Turns = Sequence[tuple[str, str]]
_TTFT = {
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
    models: Sequence[str] = ("demo", "demo-hybrid", "demo+image")
    """Folders, or models of the package; `+image`: with an image before the document. The last one
    has the conversation."""
    sizes: Sequence[int] = (1024, 4096, 16_384)
    document: int = 17_000
    turns: int = 6


class Subject:
    def __init__(self, engine: EngineClient, model: str, *, image: bool) -> None:
        self._engine, self._model, self._image = engine, model, image
        self._tenants = count()
        self._per_word = ask(engine, model, question("sample", SAMPLE), 2).prompt / SAMPLE

    def messages(self, tokens: int, asked: str, turns: Turns = ()) -> Messages:
        """A document of about so many tokens, and a question behind it and earlier turns."""
        opening: Any = document(f"document {tokens}", round(tokens / self._per_word))
        if self._image:
            opening = [_picture(tokens), {"type": "text", "text": opening}]
        texts = [opening, "I have read it.", *(text for turn in turns for text in turn), asked]
        roles = ("user", "assistant")
        return [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]

    def ask(self, messages: Messages) -> Answer:
        return ask(self._engine, self._model, messages, REPLY)

    def ask_cold(self, messages: Messages) -> Answer:
        return ask(self._engine, self._model, messages, REPLY, f"cold {next(self._tenants)}")


def _picture(seed: int) -> dict[str, Any]:
    from PIL import Image

    pixels = random.Random(seed).randbytes(3 * IMAGE_EDGE**2)  # noqa: S311
    written = io.BytesIO()
    Image.frombytes("RGB", (IMAGE_EDGE, IMAGE_EDGE), pixels).save(written, "PNG")
    url = "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def bench(plan: Plan, report: Report) -> Result:
    """JSON-able. `report` gets what is measured; tables go to stderr."""
    result = surroundings("of the checkpoint") | {"ttft": [], "conversation": []}
    total = len(plan.models) * len(plan.sizes)
    for given in plan.models:
        path, _, image = given.partition("+")
        folder, name = str(folder_of(path)), Path(given).name
        report(f"{name}: an engine starts, loads the model and times its passes")
        with separate_engine() as (engine, _):
            subject = Subject(engine, folder, image=bool(image))
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
    """Ratios compare medians: on a busy machine the fastest of a few says less. Of two cold runs
    the faster counts."""
    first = subject.ask(subject.messages(size, QUESTION))
    questions = [f"And what is the weather {i} like in Paris today?" for i in range(TRIALS)]
    turns = [subject.messages(size, asked, [(QUESTION, first.text)]) for asked in questions]
    others = [subject.messages(size, asked) for asked in questions]
    repeats = [subject.ask(subject.messages(size, QUESTION)) for _ in range(TRIALS)]
    next_turn, another = [subject.ask(turn) for turn in turns], [subject.ask(o) for o in others]
    truth = subject.ask_cold(turns[0])
    cold, repeat = min(first.first, truth.first), median(one.first for one in repeats)
    checked = [*((one, first) for one in repeats), (next_turn[0], truth)]
    if size <= ALL_COLD:  # a third cold run of a longer prompt would cost too much
        checked.append((another[0], subject.ask_cold(others[0])))
    return {
        "prompt_tokens": first.prompt,
        "cold_seconds": cold,
        "repeat_seconds": repeat,
        "repeat_cached": repeats[0].cached,
        "cold_over_repeat": round(cold / repeat, 2),
        "next_turn": _hit(next_turn, cold),
        "other_question": _hit(another, cold),
        "same_answers": f"{sum(a.text == b.text for a, b in checked)}/{len(checked)}",
    }


def _hit(runs: Sequence[Answer], cold: float) -> Result:
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
