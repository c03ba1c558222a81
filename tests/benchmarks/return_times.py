"""Rules of eviction that know when sessions come back, to learn what that knowledge is worth.

A session's path is weighed by the chance that its next request comes soon: as learned from earlier
pauses of the same kind of agent, which stands for a tenant, or as it will be. No server can know
the latter; its hit rate is the most that any estimate of return times can reach by these weights.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

from mlx_provider.engine.prefix_cache import eviction
from mlx_provider.engine.prefix_cache.tree import Node

MOST = eviction.AWAITED - 1
"""What a certain return adds to a weight of 1."""
LEARNED_SOON = 300.0
"""Seconds; 60 were no better."""
KNOWN_SOON = 60.0
"""Seconds from which the weight of a known return falls with the time until it."""


@dataclass(frozen=True)
class _Waiting:
    since: float
    calls: bool
    next: float | None


class Returns:
    """The sessions of a replay, and when their last answers ended."""

    def __init__(self, *, known: bool) -> None:
        """`known`: the next request of a session is known, not learned."""
        self._known = known
        self._original = eviction.value
        self._now = 0.0
        self._waiting: dict[str, _Waiting] = {}
        self._pauses: dict[tuple[str, bool], list[float]] = {}

    def asks(self, session: str, now: float) -> None:
        self._now = now
        if before := self._waiting.pop(session, None):
            seen = self._pauses.setdefault((_kind(session), before.calls), [])
            insort(seen, now - before.since)

    def waits(self, session: str, since: float, comes: float | None, *, calls: bool) -> None:
        """`comes`: when its next request will come. `calls`: its answer ends in calls."""
        self._waiting[session] = _Waiting(since, calls, comes)

    def value(self, node: Node, clock: int, held: int) -> float:
        """In the place of `eviction.value`."""
        found = self._original(node, clock, held)
        if node.guessed or not node.sessions:
            return found
        pin = eviction.AWAITED if node.awaited else eviction.PINNED
        return found / pin * (1 + MOST * max(map(self._chance, node.sessions)))

    def _chance(self, session: str) -> float:
        """That it comes soon."""
        waiting = self._waiting.get(session)
        if waiting is None:
            return 1.0  # it is being served
        if self._known:
            left = None if waiting.next is None else max(1.0, waiting.next - self._now)
            return 0.0 if left is None else min(1.0, KNOWN_SOON / left)
        pauses = self._pauses.get((_kind(session), waiting.calls), [])
        passed = max(0.0, self._now - waiting.since)
        later = len(pauses) - bisect_right(pauses, passed)
        soon = later - (len(pauses) - bisect_right(pauses, passed + LEARNED_SOON))
        return (soon + (1 if waiting.calls else 0.2)) / (later + 1)  # before any pause was seen


def _kind(session: str) -> str:
    return session.split(maxsplit=1)[0]
