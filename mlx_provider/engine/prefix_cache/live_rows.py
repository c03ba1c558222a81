"""Rows in use whose first tokens another row can share.

A row stays as it is until another row begins with the same tokens. Then its cache is divided, which
copies it once: the common tokens become a `Prefix` that both hold, and what follows stays its own.
Further rows hold the same prefix. A row that nobody shares with keeps its keys in one buffer, which
is the fastest to attend to. Each row's reserved memory includes the prefix, because it may be the
last that holds it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...isolation import Isolation
from ...upstream.shared_kv import SHAREABLE, Prefix, SharedKV, SharedQuantisedKV, divide
from ..memory import leaves
from .key import CacheKey, Ids
from .tree import common

log = logging.getLogger(__name__)

Prefixes = Mapping[int, Prefix]
"""By leaf index of the row cache."""
NONE: Prefixes = {}


@dataclass(frozen=True)
class Source:
    """What other rows can share, by leaf index: the layers of a row in use, or a prefix of rows."""

    key: CacheKey
    ids: Ids
    """Tokens of the row's prompt, or of the prefix."""
    leaves: Mapping[int, weakref.ref[Any]]
    """Gone as soon as the rows end. A row's layers are also gone once it is merged with others."""

    def held(self) -> dict[int, Any] | None:
        """Its leaves. `None`: they are gone."""
        found = {leaf: each for leaf, ref in self.leaves.items() if (each := ref()) is not None}
        return found if len(found) == len(self.leaves) else None


class LiveRows:
    """All methods run on the engine thread."""

    def __init__(self, least: int) -> None:
        """`least`: fewest tokens to share."""
        self._least = least
        self._sources: list[Source] = []

    def add(self, key: CacheKey, ids: Ids, cache: Sequence[Any]) -> None:
        """Remember a row whose prompt is `ids`. Its cache may hold only a part of it yet."""
        both = (*SHAREABLE, SharedKV, SharedQuantisedKV)  # they are whole again some day
        held = {leaf: each for leaf, each in enumerate(leaves(cache)) if type(each) in both}
        self._remember(key, ids, held)

    def prefixes(self, key: CacheKey, ids: Ids) -> Prefixes:
        """The longest prefix of `ids` that can be shared. May divide the cache of a row in use."""
        self._sources = [source for source in self._sources if source.held() is not None]
        best, length, exact = None, 0, False
        for source in self._sources:
            held = source.held() if source.key == key else None
            if held is None:
                continue
            whole = min(map(_shareable, held.values()))
            usable = min(common(source.ids, ids), whole)
            longer = (usable, usable == whole) > (length, exact)
            if usable >= self._least and longer and all(_worth(e, usable) for e in held.values()):
                best, length, exact = held, usable, usable == whole
        if best is None:
            return NONE
        with Isolation() as tried:  # a failed pass of that row must not fail this one
            found = {leaf: _prefix(each, length) for leaf, each in best.items()}
            mx.eval([[each.keys, each.values] for each in found.values()])
            if any(found[leaf] is not each for leaf, each in best.items()):
                self._remember(key, ids[:length], found)
            return found
        if tried.fault is not None:
            log.warning("a prefix in use is not shared: %s", tried.fault.summary)
        return NONE

    def _remember(self, key: CacheKey, ids: Ids, held: Mapping[int, Any]) -> None:
        if held:
            refs = {leaf: weakref.ref(each) for leaf, each in held.items()}
            self._sources.append(Source(key, ids, refs))


def _shareable(each: Any) -> int:
    """Tokens that others can share. One at least of a row stays its own."""
    if isinstance(each, Prefix):
        return each.length
    # a divided row has a prefix, which is a source of its own
    return max(0, int(each.offset) - 1) if type(each) in SHAREABLE else 0


def _worth(each: Any, tokens: int) -> bool:
    """Whether no more tokens are copied out of a row than are shared."""
    return isinstance(each, Prefix) or each.offset <= 2 * tokens


def _prefix(each: Any, tokens: int) -> Prefix:
    return each.head(tokens) if isinstance(each, Prefix) else divide(each, tokens)
