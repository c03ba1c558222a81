"""Questions of random words: the same for every side, and never twice in a run."""

from __future__ import annotations

import random

from .models.random_weights import WORDS
from .servers.client import Messages

ORDER = "Tell me a long story in which all of these words are."
"""Last, so that no two questions begin alike."""


def questions(part: str, count: int, turn: int, words: int) -> list[Messages]:
    """`words` words to twice as many."""
    dice = random.Random(f"{part} {count} {turn}")  # noqa: S311
    lengths = [max(4, words * (2 + i % 3) // 2) for i in range(count)]
    return [_message(" ".join(dice.choice(WORDS) for _ in range(length))) for length in lengths]


def document(name: str, words: int) -> str:
    dice = random.Random(name)  # noqa: S311
    return " ".join(dice.choice(WORDS) for _ in range(words))


def _message(text: str) -> Messages:
    return [{"role": "user", "content": f"{text}. {ORDER}"}]
