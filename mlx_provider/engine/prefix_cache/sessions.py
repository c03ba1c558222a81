"""The newest path of each session, evicted later than others, and its share of the cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from .tree import Node, split

MAX_SESSIONS = 256
"""The least recently used session loses its pin first."""
LIVE_TURNS = 16
"""A session counts as gone this many stored paths after it last returned. A request stores two."""


@dataclass(frozen=True)
class Share:
    nbytes: int
    equal: int = 0
    """Bytes of its head that each path of `siblings` keeps."""
    siblings: Sequence[Node] = ()


class Sessions:
    def __init__(self) -> None:
        self._leaves: OrderedDict[str, Node] = OrderedDict()
        self._turn = 0
        self._last = ""
        self._wanted: dict[str, int] = {}
        self._returned: dict[str, int] = {}
        """The time at which a session last continued after another session's turn."""

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, session: str) -> bool:
        return session in self._leaves

    def pin(self, session: str, leaf: Node, wanted: int = 0, *, awaited: bool = False) -> None:
        """Mark the path to `leaf` in place of the session's previous path. `wanted`: bytes of the
        whole path, of which `leaf` may end only a head."""
        self._turn += 1
        if session in self._leaves and session != self._last:
            self._returned[session] = self._turn
        self._last = session
        self._unpin(session)
        self._leaves[session] = leaf
        self._wanted[session] = wanted
        for node in leaf.path():
            node.sessions[session] = awaited
        while len(self._leaves) > MAX_SESSIONS:
            gone = next(iter(self._leaves))
            self._unpin(gone)
            self._returned.pop(gone, None)
            del self._wanted[gone]

    def share(self, session: str | None, budget: int) -> Share:
        """The part of `budget` bytes that a path of the session may use. Sessions that take turns
        each keep the head of their path: more than an equal share would be evicted before their
        next turn. A session that has never returned keeps no share."""
        others = [] if session is None else self._taking_turns(session)
        equal = budget // (1 + len(others))
        left = budget - sum(min(equal, self._wanted[each]) for each in others)
        return Share(left, equal, [self._leaves[each] for each in others])

    def clear(self) -> None:
        self._leaves.clear()
        self._returned.clear()
        self._wanted.clear()

    def _taking_turns(self, session: str) -> list[str]:
        since = self._turn - LIVE_TURNS
        return [each for each, turn in self._returned.items() if turn > since and each != session]

    def _unpin(self, session: str) -> None:
        leaf = self._leaves.pop(session, None)
        for node in leaf.path() if leaf is not None else ():
            node.sessions.pop(session, None)


def head(leaf: Node, nbytes: int) -> list[Node]:
    found: list[Node] = []
    for node in _kept(leaf):
        left = nbytes - sum(each.nbytes for each in found)
        tokens = left * len(node.tokens) // node.token_bytes
        if node.nbytes > left:
            found += [split(node, tokens)] if node.complete and tokens else []
            break
        found.append(node)
    while found and not found[-1].complete and found[-1].snapshot is None:
        found.pop()
    return found


def _kept(leaf: Node) -> list[Node]:
    return [node for node in leaf.path() if node.segment is not None]
