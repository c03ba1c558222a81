"""The prefix cache of an engine in the simulation: whole conversations, the oldest out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Tier:
    """Tokens by name, as many as fit; what was used last stays longest."""

    room: float
    """Tokens."""
    entries: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Name -> tokens that it takes."""
    used: int = 0
    dropped: int = 0

    def find(self, name: int) -> int:
        """Tokens of it; 0: not here."""
        found = self.entries.get(name, 0)
        if found:
            self.entries.move_to_end(name)
        return found

    def keep(self, name: int, tokens: int) -> None:
        """So many of it from now on."""
        entries = self.entries
        self.used += tokens - entries.get(name, 0)
        entries[name] = tokens
        entries.move_to_end(name)
        while self.used > self.room:
            _, lost = entries.popitem(last=False)
            self.used -= lost
            self.dropped += 1

    def clear(self) -> None:
        self.entries.clear()
        self.used = 0


class Found(NamedTuple):
    """What of a prompt need not be computed."""

    memory: int
    disk: int = 0
    """Tokens that are read from the disk."""


@dataclass
class PrefixCache:
    """A tier in memory and perhaps one on a disk, which gets whatever memory gets.

    A conversation is stored behind its system prompt, and that once for all: its name is below
    zero. Whoever uses a conversation uses its system prompt, which therefore stays longer.
    """

    memory: Tier
    disk: Tier | None = None

    def take(self, talk: int, prefix: int, shared: int, common: int) -> Found:
        """Of a prompt that has `common` tokens in common with what this conversation held, and
        `shared` with others of its system prompt."""
        system = ~prefix
        here = self.memory.find(talk) if common > shared else 0
        head = shared if shared and self.memory.find(system) else 0
        if here and (head or not shared):
            here = min(shared + here, common)
        else:
            here = head
        if self.disk is None or (here == common and common > shared):
            return Found(here)
        there = self._with(self.disk, talk, prefix, shared, common)
        return Found(here, max(0, there - here))

    def _with(self, disk: Tier, talk: int, prefix: int, shared: int, common: int) -> int:
        """Tokens from the front that memory and disk have together."""
        system = ~prefix
        if shared and not (disk.find(system) or system in self.memory.entries):
            return 0
        own = 0
        if common > shared:
            own = max(disk.find(talk), self.memory.entries.get(talk, 0))
        return min(shared + own, common) if own else shared

    def keep(self, talk: int, prefix: int, shared: int, tokens: int) -> None:
        """A conversation holds so many tokens, its system prompt among them."""
        own = max(0, tokens - shared)
        for tier in (self.memory, self.disk):
            if tier is not None:
                if own:
                    tier.keep(talk, own)
                if shared:
                    tier.keep(~prefix, shared)
