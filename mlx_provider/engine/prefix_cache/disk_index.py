"""The disk space of the prefix cache. Imports no mlx.

An index of the files in the disk tier by prefix.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path

from .files import Header
from .tree import CacheKey, Ids, common

FOLDER = "prefixes"
SHARE = 0.1
"""Share of the space that is free without the prefix cache."""
MOST_BYTES = 20 * 10**9


def disk_limit(folder: Path, chosen: int | None) -> int:
    if chosen is not None:
        return chosen
    place = next((each for each in (folder, *folder.parents) if each.is_dir()), Path("/"))
    return min(MOST_BYTES, int(SHARE * (shutil.disk_usage(place).free + held(folder))))


def held(folder: Path) -> int:
    sizes = []
    for path in (folder / FOLDER).glob("*"):
        try:
            sizes.append(used(path.lstat()))
        except FileNotFoundError:  # another process removed it
            continue
    return sum(sizes)


def used(file: os.stat_result) -> int:
    """Allocated bytes: holes take none."""
    return min(file.st_size, 512 * file.st_blocks)


Step = tuple[Header, int, int]
"""A segment's file, its first token, and the number of its tokens that match."""


class Chain:
    """Digests of a key's tokens `0 .. at`, for ascending `at`."""

    def __init__(self, key: CacheKey, ids: Ids) -> None:
        self._ids = ids
        self._at = 0
        self._hash = hashlib.blake2b(key.digest(), digest_size=16)

    def at(self, position: int) -> str:
        if position < self._at:
            raise ValueError("digests are taken in ascending order")
        self._hash.update(self._ids[self._at : position].tobytes())
        self._at = position
        return self._hash.hexdigest()


@dataclass
class Index:
    """The files on disk, by the digest of the tokens before them."""

    segments: dict[str, dict[str, Header]] = field(default_factory=dict)
    states: dict[str, Header] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> Set[str]:
        return self.sizes.keys()

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    def add(self, header: Header) -> None:
        self.sizes[header.name] = header.nbytes
        if len(header.tokens):
            self.segments.setdefault(header.parent, {})[header.name] = header
        else:
            self.states[header.parent] = header

    def remove(self, name: str) -> None:
        self.sizes.pop(name, None)
        parent = name.partition("-")[0]
        self.segments.get(parent, {}).pop(name, None)
        if parent in self.states and self.states[parent].name == name:
            del self.states[parent]

    def walk(self, key: CacheKey, ids: Ids) -> list[Step]:
        chain, at, steps = Chain(key, ids), 0, []
        while at < len(ids):
            known = self.segments.get(chain.at(at), {}).values()
            fits = [(common(h.tokens, ids[at:]), h.complete, h.name, h) for h in known]
            took, _, _, header = max(fits, default=(0, False, "", None))
            if header is None or not took:
                break
            steps.append((header, at, took))
            at += took
        return steps

    def states_along(self, key: CacheKey, ids: Ids, limit: int) -> list[Header]:
        """Longest first."""
        own, limit = key.digest().hex(), min(limit, len(ids))
        known = self.states.values()
        stops = sorted({h.start for h in known if h.key == own and h.start <= limit})
        chain = Chain(key, ids)
        found = [self.states.get(chain.at(stop)) for stop in stops]
        return [header for header in reversed(found) if header is not None]
