"""What LiteLLM's router keeps in memory: sessions' pins and counts of requests that run.

Both are items of one `InMemoryCache` (1.106.2, `router.py`: `Router.cache`): 200 of them, of which
the one that would expire first makes room for another (`in_memory_cache.py`, `evict_cache`). A pin
expires an hour after the session's last request; a count an hour after it was made, however often
it changed. With Redis nothing is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

TTL = 3600.0
"""Seconds: `deployment_affinity_ttl_seconds`, and least-busy's `IN_FLIGHT_COUNT_TTL_SECONDS`."""
LITELLM = 200
"""`DEFAULT_MAX_SIZE_IN_MEMORY`."""


class Counts:
    """Requests of each engine, and which engines have how few: a set of bits for each number."""

    def __init__(self, engines: int) -> None:
        self.of = [0] * engines
        self.levels = [(1 << engines) - 1]

    def put(self, engine: int, count: int) -> None:
        bit, levels = 1 << engine, self.levels
        levels[self.of[engine]] ^= bit
        while len(levels) <= count:
            levels.append(0)
        levels[count] |= bit
        self.of[engine] = count

    def fewest(self, among: int) -> int:
        """Those of a set that have the fewest. `among` is not empty."""
        return next(found for level in self.levels if (found := level & among))


@dataclass
class Memory:
    """LiteLLM's cache of items that all live equally long. Engine e's count is item `~e`."""

    counts: Counts
    most: int | None = None
    """Items; `None`: all are kept, as in Redis."""
    ttl: float = TTL
    items: OrderedDict[int, tuple[float, int]] = field(default_factory=OrderedDict)
    """Name -> (when it expires, value), in the order of that time."""
    peak: int = 0
    evicted: int = 0
    """Pins that made room before their time."""

    def pin(self, session: int, now: float) -> int | None:
        """Where a session is pinned."""
        found = self.items.get(session)
        return found[1] if found is not None and found[0] >= now else None

    def put_pin(self, session: int, engine: int, now: float) -> None:
        self.items.pop(session, None)
        self._make_room(now)
        self.items[session] = (now + self.ttl, engine)
        self.peak = max(self.peak, len(self.items))

    def change(self, engine: int, more: int, now: float) -> None:
        """Count requests that have begun or ended there. What was forgotten counts from nothing,
        and one that is below nothing is written again (`least_busy.py`, `_async_increment`)."""
        found = self.items.get(~engine)
        before = found[1] if found is not None and found[0] >= now else 0
        self._put_count(engine, before + more, now)
        if before + more < 0:
            self._put_count(engine, 0, now)

    def _put_count(self, engine: int, count: int, now: float) -> None:
        self._make_room(now)
        held = self.items.get(~engine)
        self.items[~engine] = (now + self.ttl if held is None else held[0], count)
        self.counts.put(engine, max(0, count))
        self.peak = max(self.peak, len(self.items))

    def _make_room(self, now: float) -> None:
        items = self.items
        while items and items[next(iter(items))][0] <= now:
            self._drop()
        while self.most is not None and len(items) >= self.most:
            self.evicted += self._drop() >= 0

    def _drop(self) -> int:
        name, _ = self.items.popitem(last=False)
        if name < 0:
            self.counts.put(~name, 0)
        return name
