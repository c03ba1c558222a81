"""The newest path of each session, which is evicted later than others."""

from __future__ import annotations

from collections import OrderedDict

from .tree import Node

MAX_SESSIONS = 256
"""Pinned sessions; the one longest unused loses its pin first."""


class Sessions:
    """Marks the nodes of each session's newest path."""

    def __init__(self) -> None:
        self._leaves: OrderedDict[str, Node] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, session: str) -> bool:
        return session in self._leaves

    def pin(self, session: str, leaf: Node) -> None:
        """Mark the path to `leaf` in place of the session's last one."""
        self._unpin(session)
        self._leaves[session] = leaf
        for node in leaf.path():
            node.sessions.add(session)
        while len(self._leaves) > MAX_SESSIONS:
            self._unpin(next(iter(self._leaves)))

    def clear(self) -> None:
        self._leaves.clear()

    def _unpin(self, session: str) -> None:
        leaf = self._leaves.pop(session, None)
        for node in leaf.path() if leaf is not None else ():
            node.sessions.discard(session)
