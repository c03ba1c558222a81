"""Random choices that stay on one side of the train / held-out split."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from words import SYLLABLES

T = TypeVar("T")
HELD_OUT_SHARE = 8  # one key in eight is never trained on


def is_held_out(*key: object) -> bool:
    """Whether a key (a task and what is asked about) belongs to the held-out side."""
    return hashlib.md5(repr(key).encode()).digest()[0] % HELD_OUT_SHARE == 0


class Dice:
    """Seeded choices. With `held_out` every key is a held-out one, without it none is."""

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.random = random.Random(seed)
        self.held_out = held_out

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return self.random.choice(items)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random.random() < probability

    def key(self, task: str, make: Callable[[], tuple]) -> tuple:
        """A key made by `make` that lies on this side of the split."""
        while True:
            key = make()
            if is_held_out(task, *key) == self.held_out:
                return key

    def picture_seed(self) -> int:
        """Odd for held-out pictures, even for trained ones."""
        return self.random.randrange(1 << 30) * 2 + self.held_out

    def invented_name(self) -> str:
        """A name of two or three syllables from this side of the split."""

        def make() -> tuple[str]:
            return ("".join(self.pick(SYLLABLES) for _ in range(self.pick([2, 3]))).capitalize(),)

        return self.key("invented", make)[0]

    def typed(self, text: str) -> str:
        """The text as people type it: now and then no full stop, or no capital letter."""
        if text[-1] in ".!?" and self.chance(0.2):
            text = text[:-1]
        # "I" stays a capital: it is a word of its own
        if not text.startswith("I ") and self.chance(0.15):
            text = text[0].lower() + text[1:]
        return text
