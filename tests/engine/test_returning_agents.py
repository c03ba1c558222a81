"""Which sessions stay in a prefix cache with space for a third of the agents' tokens."""

from __future__ import annotations

import random
from functools import cache

import pytest

from mlx_provider.engine.prefix_cache import eviction
from return_times import Returns
from returning_agents import (
    CODEX_TOOLS,
    LAYERS,
    Kind,
    hit_rates,
    least_recently_used,
    sessions,
    without_calls,
)

EVERY = sessions(5, span=150)


@cache
def today(layers: Kind) -> dict[str, float]:
    return hit_rates(EVERY, layers)


@pytest.mark.parametrize("layers", LAYERS)
def test_sessions_whose_tools_run_are_evicted_after_others(layers: Kind) -> None:
    found = today(layers)["all"]
    assert found > hit_rates(EVERY, layers, least_recently_used)["all"]
    assert found > hit_rates(EVERY, layers, without_calls(eviction.value))["all"]


@pytest.mark.parametrize("layers", LAYERS)
def test_the_prefix_of_a_client_that_announces_its_return_is_found(layers: Kind) -> None:
    assert hit_rates(EVERY, layers, retained="chat")["chat"] > today(layers)["chat"]


def test_the_hit_rate_is_at_most_that_with_known_returns() -> None:
    known = hit_rates(EVERY, "kv", returns=Returns(known=True))["all"]
    learned = hit_rates(EVERY, "kv", returns=Returns(known=False))["all"]
    assert known > max(learned, today("kv")["all"])


def test_simulated_pauses_have_the_published_distribution() -> None:
    drawn = random.Random(0)
    pauses = [CODEX_TOOLS.draw(drawn) for _ in range(4000)]
    for share, seconds in ((0.5, 0.626), (0.88, 10), (0.969, 60), (1, 3600)):
        assert sum(pause <= seconds for pause in pauses) / 4000 == pytest.approx(share, abs=0.02)
