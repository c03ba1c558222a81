"""Who chooses the engine of a request: what LiteLLM's router can do, alone and with our hook.

Engines are sets of bits. `among` holds those that may be asked: it is never empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Protocol

from .router_state import LITELLM, Counts, Memory

_MULTIPLIER, _INCREMENT, _WORD = 6_364_136_223_846_793_005, 1_442_695_040_888_963_407, (1 << 64) - 1
"""Of Knuth's linear congruential generator (MMIX)."""
TRIES = 16


class Policy(Protocol):
    one_cache: bool
    """Whether all engines share a cache without end: what no policy can pass."""
    memory: Memory | None
    """What it keeps of sessions and engines."""

    def choose(self, talk: int, prefix: int, among: int, now: float) -> int:
        """The engine of a request."""

    def begun(self, engine: int, now: float) -> None:
        """A request runs there."""

    def ended(self, engine: int, now: float) -> None:
        """It does no longer."""


def lowest(engines: int) -> int:
    return (engines & -engines).bit_length() - 1


def preferred(key: int, count: int) -> Iterator[int]:
    """The engines as a key ranks them, always alike: each is first for its part of all keys."""
    state = (key + 1) * _MULTIPLIER & _WORD
    while True:
        state = (state * _MULTIPLIER + _INCREMENT) & _WORD
        yield (state >> 33) % count


def first_of(key: int, count: int, among: int) -> int:
    """The first of `among` as a key ranks them; after some tries its next neighbour."""
    last = 0
    for last in islice(preferred(key, count), TRIES):
        if among >> last & 1:
            return last
    later = among >> last
    return last + lowest(later) if later else lowest(among)


class Stateless:
    one_cache = False
    memory: Memory | None = None

    def __init__(self, engines: int) -> None:
        self.engines = engines

    def begun(self, engine: int, now: float) -> None:
        """Nothing is noted."""

    def ended(self, engine: int, now: float) -> None:
        """Nothing is noted."""


class Shuffle(Stateless):
    """`simple-shuffle`: any of them."""

    def __init__(self, engines: int, seed: int = 0) -> None:
        super().__init__(engines)
        self.random = Random(seed)

    def choose(self, talk: int, prefix: int, among: int, now: float) -> int:
        while True:
            engine = int(self.random.random() * self.engines)
            if among >> engine & 1:
                return engine


class ByPrefix(Stateless):
    """By the hash of the system prompt."""

    def choose(self, talk: int, prefix: int, among: int, now: float) -> int:
        return first_of(~prefix, self.engines, among)


class BySession(Stateless):
    """Consistent hashing of the session's name."""

    def choose(self, talk: int, prefix: int, among: int, now: float) -> int:
        return first_of(talk, self.engines, among)


class LeastBusy:
    """`least-busy`: the first in the config of those with the fewest requests."""

    one_cache = False

    def __init__(self, engines: int, most: int | None = None) -> None:
        self.engines = engines
        self.counts = Counts(engines)
        self.noted = Memory(self.counts, most)
        self.memory: Memory | None = self.noted

    def choose(self, talk: int, prefix: int, among: int, now: float) -> int:
        return lowest(self.counts.fewest(among))

    def begun(self, engine: int, now: float) -> None:
        self.noted.change(engine, 1, now)

    def ended(self, engine: int, now: float) -> None:
        self.noted.change(engine, -1, now)


class Affinity(LeastBusy):
    """As `init --engine` writes it: a session stays; a new one goes to the engine with the fewest
    requests, of equal ones to that which its name points to (`litellm/fleet.py`)."""

    def choose(self, talk: int, prefix: int, among: int, now: float) -> int:
        engine = self.noted.pin(talk, now)
        if engine is None or not among >> engine & 1:
            engine = first_of(talk, self.engines, self.counts.fewest(among))
        self.noted.put_pin(talk, engine, now)
        return engine


class Everywhere(LeastBusy):
    """No policy: whatever any engine has computed is cached on each."""

    one_cache = True


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "simple-shuffle": Shuffle,
    "least-busy": lambda engines, seed: LeastBusy(engines),
    "system-prompt": lambda engines, seed: ByPrefix(engines),
    "session-hash": lambda engines, seed: BySession(engines),
    "affinity-200": lambda engines, seed: Affinity(engines, LITELLM),
    "affinity": lambda engines, seed: Affinity(engines),
    "bound": lambda engines, seed: Everywhere(engines),
}
"""Name -> policy for so many engines, by a seed."""
