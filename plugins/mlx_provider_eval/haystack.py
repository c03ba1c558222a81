"""Long prompts that contain one fact at a chosen depth, and ask for it at the end.

A `talk` has many short turns, in one of which the user tells a name; the demo models were trained
on such talks. A `document` is one message with a report of different sentences, one of which tells
a code; it is for larger models. Another `seed` gives another prompt of the same kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]

NAMES = ("Maria", "Peter", "Anna", "Tom", "Lena", "Paul")
TOLD, GREETED = "My name is {}.", "Nice to meet you, {}!"
ASKED = "What is my name?"
TALK = (
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Count from 1 to 5.", "1, 2, 3, 4, 5"),
    ("Say: BANANA", "BANANA"),
    ("How are you?", "I am fine, thank you."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9"),
    ("Thank you!", "You are welcome."),
)
"""What stands around the name."""

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


@dataclass(frozen=True)
class Haystack:
    name: str
    build: Callable[[int, float, int, int], Messages]
    """(parts, depth from 0 to 1, seed, wanted tokens) -> the messages. With one length, more parts
    give more tokens. Prompts of different lengths begin differently."""
    answer: Callable[[int], str]
    """The text that a right reply contains, by seed."""
    hint: str
    """Description of the question."""


def talk(turns: int, depth: float, seed: int, length: int) -> Messages:
    """`turns` turns of talk; one of them has the name."""
    name = NAMES[seed % len(NAMES)]
    dice = _dice(depth, seed, length)
    said = [dice.choice(TALK) for _ in range(turns)]
    place = round(depth * turns)
    summary = [*said[:place], (TOLD.format(name), GREETED.format(name)), *said[place:]]
    return [
        *(
            {"role": role, "content": text}
            for turn in summary
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ),
        {"role": "user", "content": ASKED},
    ]


def document(sentences: int, depth: float, seed: int, length: int) -> Messages:
    """`sentences` sentences; one of them has the code."""
    dice = _dice(depth, seed, length)
    parts = [_sentence(dice) for _ in range(sentences)]
    colour, code = _locker(seed)
    parts.insert(round(depth * sentences), CODE.format(colour=colour, code=code))
    text = OPENING + " ".join(parts) + QUESTION.format(colour=colour)
    return [{"role": "user", "content": text}]


def _dice(depth: float, seed: int, length: int) -> random.Random:
    """Different random numbers for each prompt, so that no prompt is found in a prefix cache."""
    return random.Random(f"{depth} {seed} {length}")  # noqa: S311


def _sentence(dice: random.Random) -> str:
    one, other = dice.sample(PEOPLE, 2)
    here, there = dice.sample(PLACES, 2)
    return dice.choice(SENTENCES).format(
        day=dice.randint(1, 365),
        count=dice.randint(2, 99),
        goods=dice.choice(GOODS),
        one=one,
        other=other,
        here=here,
        there=there,
    )


def _locker(seed: int) -> tuple[str, str]:
    """Its colour, and a code of six digits. All other numbers in the text are shorter."""
    dice = random.Random(f"locker {seed}")  # noqa: S311
    return dice.choice(COLOURS), str(dice.randint(100_000, 999_999))


HAYSTACKS: Mapping[str, Haystack] = {
    each.name: each
    for each in (
        Haystack("talk", talk, lambda seed: NAMES[seed % len(NAMES)], "a name, told in a talk"),
        Haystack("document", document, lambda seed: _locker(seed)[1], "a code, told in a report"),
    )
}


def as_long_as(
    build: Callable[[int], Messages], count: Callable[[Messages], int], tokens: int, near: int = 64
) -> tuple[Messages, int, int]:
    """The longest prompt within a number of tokens: its messages, tokens and parts.

    `near`: parts of a prompt with about that length, as the start of the search. Counts five to
    ten prompts. A prompt without any part can be longer.
    """
    least = count(build(0))
    best, beyond, parts = (0, least), 0, max(1, near)
    while parts > best[0] and (not beyond or parts < beyond):
        found = count(build(parts))
        each = max(1.0, (found - least) / parts)
        if found <= tokens:
            best = (parts, found)
            parts += max(1, int((tokens - found) / each))
        else:
            beyond = parts
            parts = max(best[0] + 1, parts - max(1, int((found - tokens) / each)))
        if beyond and parts >= beyond:
            parts = (best[0] + beyond) // 2
    return build(best[0]), best[1], best[0]
