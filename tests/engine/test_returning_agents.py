"""Who stays in a prefix cache that holds a third of what agents have sent."""

from __future__ import annotations

from functools import cache

import pytest

from mlx_provider.engine.prefix_cache import eviction
from returning_agents import (
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
def test_sessions_whose_tools_run_stay_before_others(layers: Kind) -> None:
    found = today(layers)["all"]
    assert found > hit_rates(EVERY, layers, least_recently_used)["all"]
    assert found > hit_rates(EVERY, layers, without_calls(eviction.value))["all"]


@pytest.mark.parametrize("layers", LAYERS)
def test_a_client_that_says_that_it_comes_back_is_found_again(layers: Kind) -> None:
    assert hit_rates(EVERY, layers, retained="chat")["chat"] > today(layers)["chat"]
