"""Rows from memory and disk, where no engine thread runs."""

import threading
from functools import partial
from typing import Any, Protocol

from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.disk import DiskTier, Restore
from mlx_provider.engine.prefix_cache.tree import CacheKey, as_ids
from schedules import Calls


class MakesCache(Protocol):
    """A model, as far as it matters here."""

    def make_cache(self) -> list[Any]: ...


def restored(
    prefix_cache: PrefixCache,
    calls: Calls,
    model: MakesCache,
    key: CacheKey,
    tokens: list[int],
    *,
    room: int = 0,
    grid: int = 1,
) -> tuple[list[Any], int]:
    """A row with what memory and disk have of a prompt, and how many tokens that is."""
    ids, make, disk = as_ids(tokens), model.make_cache, prefix_cache.disk
    find = partial(prefix_cache.match, key, ids, len(ids) - 1)
    if disk is not None:
        restore = Restore(disk, disk.fill(key, ids, find, make, room, grid))
        while not restore.ended:
            calls.run()
        if restore.cache is not None:
            return restore.cache, restore.length
    match = find()
    return prefix_cache.acquire(match, make)[0], match.length


def flush(disk: DiskTier | None) -> None:
    """Wait until the disk tier has done all that it was asked for."""
    disk.writer.do((done := threading.Event()).set)
    assert done.wait(300)
