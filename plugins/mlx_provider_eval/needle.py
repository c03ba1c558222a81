"""`mlx-provider eval needle`: whether a model finds a fact, by length of the prompt and depth of
the fact. A prompt is a report of different sentences. One of them tells the code of a locker, and
the question at the end asks for this code. A cell is one length and depth, asked several times."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby, takewhile
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text

from mlx_provider.commands import context_in_memory
from mlx_provider.errors import ContextTooLong

from .client import Client, Reply
from .subjects import LoadedSubject, Progress, Result

Messages = list[dict[str, Any]]
PEOPLE = ("Ines", "Bertil", "Oumar", "Yuki", "Greta", "Tomasz", "Leila", "Hugo", "Amara", "Piet")
PLACES = ("the harbour", "Kiruna", "the old mill", "Porto", "the north gate", "Lviv", "the archive")
GOODS = ("crates of pears", "rolls of cable", "sacks of barley", "spare wheels", "window panes")
SENTENCES = (
    "On day {day} {one} brought {count} {goods} from {here} to {there}.",
    "{one} wrote to {other} that {count} {goods} were missing in {there}.",
    "In {here} it took {one} and {other} {count} hours to count the {goods}.",
    "On day {day} nobody came to {there}, and {one} stayed in {here} with {count} {goods}.",
    "{other} sold {count} {goods} in {here}, which {one} had kept since day {day}.",
)
COLOURS = ("red", "green", "blue", "white", "yellow", "grey")
CODE = "The code of the {colour} locker is {code}."
OPENING = "Read this report. At its end there is a question about it.\n\n"
QUESTION = "\n\nWhat is the code of the {colour} locker? Answer with the code alone."
DEPTHS = (0, 25, 50, 75, 100)  # percent of the prompt before the fact


def document(depth: float, seed: int, length: int, sentences: int) -> Messages:
    """A prompt of so many sentences, with a fact after a share `depth` (0 to 1) of them. `seed`
    decides the code. Each depth, seed and `length` (any number) gives other sentences, so that no
    prefix cache has them."""
    dice = random.Random(f"{depth} {seed} {length}")  # noqa: S311
    parts = [_sentence(dice) for _ in range(sentences)]
    colour, code = locker(seed)
    parts.insert(round(depth * sentences), CODE.format(colour=colour, code=code))
    text = OPENING + " ".join(parts) + QUESTION.format(colour=colour)
    return [{"role": "user", "content": text}]


def _sentence(dice: random.Random) -> str:
    one, other = dice.sample(PEOPLE, 2)
    here, there = dice.sample(PLACES, 2)
    day, count, goods = dice.randint(1, 365), dice.randint(2, 99), dice.choice(GOODS)
    words = {"day": day, "count": count, "goods": goods}
    return dice.choice(SENTENCES).format(one=one, other=other, here=here, there=there, **words)


def locker(seed: int) -> tuple[str, str]:
    """The colour of a locker, and a code of six digits; all other numbers are shorter."""
    dice = random.Random(f"locker {seed}")  # noqa: S311
    return dice.choice(COLOURS), str(dice.randint(100_000, 999_999))


def longest_prompt(
    build: Callable[[int], Messages], count: Callable[[Messages], int], tokens: int, near: int = 64
) -> tuple[Messages, int, int]:
    """The messages of a prompt with nearly `tokens` tokens, the number of its tokens, and that of
    its parts. `build` makes a prompt of so many parts, and `count` counts its tokens. The search
    begins at `near` parts. Only a prompt without parts can have more than `tokens`."""
    least, parts = count(build(0)), max(1, near)
    for _ in range(4):
        each = max(1.0, (count(build(parts)) - least) / parts)
        parts = max(1, int((tokens - least) / each))
    while (found := count(build(parts))) > tokens and parts:
        parts -= 1
    return build(parts), found, parts


def lengths(least: int, limit: int) -> list[int]:
    """The lengths to measure: `least`, doubled as often as it is below `limit`, and `limit`."""
    doubled = takewhile(lambda length: length < limit, (least << power for power in range(64)))
    return [*doubled, limit]


@dataclass(frozen=True)
class Needles:
    """The plan of `eval needle`."""

    least: int = 1024  # tokens of the shortest prompt
    limit: int | None = None  # tokens of the longest; `None`: the limit of model and memory
    needles: int = 3  # requests of a cell, each with another code
    max_tokens: int = 64
    body: Mapping[str, Any] = field(default_factory=dict)
    name: ClassVar[str] = "needle"

    def as_json(self) -> Result:
        return {**asdict(self), "depths": DEPTHS}

    def measure(self, loaded: LoadedSubject, progress: Progress) -> Result:
        """The result of one subject: its `cells`, or why it was `skipped`."""
        limit, why = self.find_limit(loaded)
        if limit < 1:
            reason = f"{why} leaves no room for a prompt beside --max-tokens {self.max_tokens}"
            return {**loaded.as_json(), "skipped": reason}
        with closing(Client(loaded, self.max_tokens, self.body)) as client:
            cells = list(self._cells(loaded, client, limit, progress))
        return {**loaded.as_json(), "limit": limit, "limited_by": why, "cells": cells}

    def find_limit(self, loaded: LoadedSubject) -> tuple[int, str]:
        """Tokens of the longest prompt, and what limits it."""
        context, rest = loaded.status.context_length, self.max_tokens + 1
        memory = context_in_memory(loaded.subject.model, context)
        bounds = [(context - rest, "the model's context"), (memory - rest, "this machine's memory")]
        if self.limit is not None:
            bounds.append((self.limit, "--limit"))
        return min(bounds, key=lambda bound: bound[0])

    def _cells(
        self, loaded: LoadedSubject, client: Client, limit: int, progress: Progress
    ) -> Iterator[Result]:
        template = dict(self.body.get("chat_template_kwargs") or {})

        def count(messages: Messages) -> int:
            try:
                return loaded.count(messages, template=template)
            except ContextTooLong as error:
                return error.tokens or loaded.status.context_length

        near = 8
        for length in lengths(min(self.least, limit), limit):
            for depth in DEPTHS:
                progress(f"{length} tokens, depth {depth} %")
                asked = []
                for seed in range(self.needles):
                    build = partial(document, depth / 100, seed, length)
                    messages, tokens, near = longest_prompt(build, count, length, near)
                    asked.append((tokens, locker(seed)[1], client.ask(messages)))
                yield {"length": length, "depth": depth, **_cell(asked)}

    def report(self, found: Sequence[Result]) -> Table:
        """A table with the found codes of each subject."""
        caption = Text("\n".join(map(_reach, found)))
        table = Table(title="found, by depth of the fact", title_justify="left", caption=caption)
        table.caption_justify = "left"
        for name in ("model", "tokens", "computed", *(f"{depth} %" for depth in DEPTHS)):
            table.add_column(name, overflow="fold")
        for result in found:
            for row in _rows(result):
                tokens = max(cell["tokens"] for cell in row)
                computed = tokens - max(cell["skipped_tokens"] for cell in row)  # sparse prefill
                scores = map(_score, row)
                table.add_row(Text(result["label"]), f"{tokens:,}", f"{computed:,}", *scores)
            table.add_section()
        return table


def _cell(asked: Sequence[tuple[int, str, Reply]]) -> Result:
    """The result of one cell. `asked`: tokens, code and reply of each request."""
    wrong = [(answer, reply) for _, answer, reply in asked if answer not in reply.text]
    return {
        "tokens": max(tokens for tokens, _, _ in asked),
        "skipped_tokens": max(reply.skipped_tokens for _, _, reply in asked),
        "asked": len(asked),
        "found": len(asked) - len(wrong),
        "failed": sum(bool(reply.failure) for _, _, reply in asked),
        "missed": [{"wanted": answer, **reply.as_json()} for answer, reply in wrong],
    }


def _rows(subject: Result) -> list[list[Result]]:
    return [list(row) for _, row in groupby(subject["cells"], key=lambda cell: cell["length"])]


def _score(cell: Result) -> str:
    score = f"{cell['found']}/{cell['asked']}"
    return f"{score}, {cell['failed']} failed" if cell["failed"] else score


def _reach(subject: Result) -> str:
    """The length up to which no code was missed, in words."""
    reach = 0
    for row in _rows(subject):
        if any(cell["found"] < cell["asked"] for cell in row):
            break
        reach = max(cell["tokens"] for cell in row)
    longest = f"longest prompt {subject['limit']:,}, limited by {subject['limited_by']}"
    return f"{subject['label']}: everything found up to {reach:,} tokens ({longest})"
