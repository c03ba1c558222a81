"""The engines of a simulation: when each is free, what runs there, what each has cached.

Prompts are computed one after the other; answers are decoded by all rows together, at the pace
that rows and cached tokens give when an answer begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from .caches import PrefixCache, Tier
from .device import Speed


@dataclass(frozen=True)
class Machine:
    """What each engine has."""

    speed: Speed
    cache_bytes: float = 40e9
    disk_bytes: float = 0.0
    """Of a disk tier; 0: none."""
    disk_shared: bool = False
    """One folder of that size for all engines."""
    disk_speed: float = 2e9
    """Bytes that are read in a second."""
    most: int = 320
    """Requests that an engine holds: 64 rows and 256 that wait; it refuses more."""


class Served(NamedTuple):
    """How a request goes."""

    begun: float
    """When its first token is there."""
    ended: float
    memory: int
    """Tokens found in memory."""
    disk: int
    """Tokens read from a disk."""


class Engines:
    """So many of a machine."""

    def __init__(self, count: int, machine: Machine, *, one_cache: bool = False) -> None:
        """`one_cache`: all see the same cache, which never drops anything."""
        self.count, self.machine, self.one_cache = count, machine, one_cache
        self.free = [0.0] * count
        self.running = [0] * count
        self.full = 0
        """Those that refuse, as bits."""
        self.held = [0] * count
        """Tokens of the requests that run there."""
        self.computed = [0] * count
        """Prompt tokens that were computed."""
        self.caches = [PrefixCache(Tier(inf))] * count if one_cache else self._caches()

    def _caches(self) -> list[PrefixCache]:
        machine = self.machine
        size = machine.speed.token_bytes
        disk = Tier(machine.disk_bytes / size)

        def another() -> Tier | None:
            if not machine.disk_bytes:
                return None
            return disk if machine.disk_shared else Tier(machine.disk_bytes / size)

        return [PrefixCache(Tier(machine.cache_bytes / size), another()) for _ in range(self.count)]

    def serve(
        self,
        engine: int,
        now: float,
        talk: int,
        prefix: int,
        shared: int,
        common: int,
        prompt: int,
        answer: int,
    ) -> Served:
        """Take a request of `prompt` tokens; for the others see `PrefixCache.take`."""
        speed, cache = self.machine.speed, self.caches[engine]
        found = cache.take(talk, prefix, shared, common)
        cached = min(found.memory + found.disk, prompt - 1)
        disk = min(found.disk, cached)
        rows = self.running[engine]
        took = speed.prefill(prompt - cached, cached, rows)
        if disk:
            took += disk * speed.token_bytes / self.machine.disk_speed
        begun = max(now, self.free[engine]) + took
        self.free[engine] = begun
        self.running[engine] = rows + 1
        if rows + 1 == self.machine.most:
            self.full |= 1 << engine
        self.held[engine] += prompt
        self.computed[engine] += prompt - cached
        cache.keep(talk, prefix, shared, prompt + answer)
        pace = speed.pace(rows + 1, self.held[engine])
        return Served(begun + pace, begun + pace * answer, cached - disk, disk)

    def ended(self, engine: int, prompt: int) -> None:
        self.full &= ~(1 << engine)
        self.running[engine] -= 1
        self.held[engine] -= prompt

    def died(self, engine: int, now: float) -> None:
        """What ran there is gone."""
        self.free[engine] = now
        self.full &= ~(1 << engine)
        self.running[engine] = self.held[engine] = 0

    def restarted(self, engine: int, now: float) -> None:
        """It is there again, with an empty memory."""
        self.free[engine] = max(now, self.free[engine])
        if not self.one_cache:
            self.caches[engine].memory.clear()
