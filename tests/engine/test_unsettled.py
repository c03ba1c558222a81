"""Results of a row's passes must be reported in order."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_provider.engine.execution.mixed_chunk import Turned, Unsettled
from mlx_provider.upstream.cache_classes import append_behind, take_back, visible_behind


def ran(cache: KVCache, tokens: int) -> Turned:
    """A pass that has appended tokens."""
    cache.update_and_fetch(*[mx.zeros((1, 1, tokens, 4))] * 2)
    return Turned([cache], tokens, drafts=True)


def test_the_cache_loses_the_rejected_tokens_of_both_passes() -> None:
    cache = KVCache()
    before, last = ran(cache, 4), ran(cache, 3)
    passes = Unsettled(last, before)
    passes.keep(3)
    passes.keep(2)  # the last call counts
    assert not passes.known
    passes.follow()
    assert (cache.offset, passes.known) == (5, False)
    passes.keep(1)
    assert passes.known
    passes.settle()
    assert cache.offset == 3


def test_a_pass_without_drafts_is_settled_after_the_next_one() -> None:
    cache = KVCache()
    passes = Unsettled(last := ran(cache, 1), last)
    passes.keep(1)
    passes.follow()
    assert passes.known


@pytest.mark.parametrize("kept", [None, 2])
def test_a_pass_that_has_followed_is_taken_back(kept: int | None) -> None:
    cache = KVCache()
    before = ran(cache, 4)
    passes = Unsettled(ran(cache, 3), before)
    if kept is not None:
        passes.keep(kept)
    passes.take_back()
    assert cache.offset == (kept or 1)


def test_another_order_is_refused() -> None:
    cache = KVCache()
    one = Unsettled(ran(cache, 2))
    before = ran(cache, 2)
    two = Unsettled(ran(cache, 2), before)
    for wrong in (one.settle, one.follow, two.settle, two.follow):
        with pytest.raises(RuntimeError, match=r"kept|known"):
            wrong()
    one.keep(1)
    two.keep(1)
    for wrong in (one.follow, two.settle):
        with pytest.raises(RuntimeError, match=r"kept|known"):
            wrong()
    assert cache.offset == 6


@pytest.mark.parametrize("seen", [3, 30])
@pytest.mark.parametrize("stale", [0, 3, 7])
def test_tokens_behind_stale_ones_attend_to_their_whole_window(seen: int, stale: int) -> None:
    cache, row = RotatingKVCache(max_size=6), list[int]()
    for tokens in (seen, 1, 8):
        row += range(len(row), len(row) + tokens)
        cache.update_and_fetch(*both(row[-tokens:]))
    row = row[: len(row) - stale]
    for tokens in (3, 1, 8):
        new = [1000 * tokens + at for at in range(tokens)]
        places = mx.arange(len(row), len(row) + tokens)
        mask = visible_behind(cache, places)
        keys, _ = append_behind(cache, *both(new), mx.array([stale]))
        for at, sees in enumerate(mask.tolist(), 1):
            found = [key for key, own in zip(keys.flatten().tolist(), sees, strict=True) if own]
            assert found == [*row, *new[:at]][-6:]
        assert keys.shape[2] < 6 + 2 * 8
        take_back(cache, stale)
        assert cache.offset == len(row) + tokens
        row, stale = [*row, new[0]], tokens - 1


def both(keys: Sequence[float]) -> list[mx.array]:
    return [mx.array(keys, mx.float32).reshape(1, 1, -1, 1)] * 2
