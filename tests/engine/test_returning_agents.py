"""Who stays in a prefix cache that holds a third of what agents have sent."""

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
def test_sessions_whose_tools_run_stay_before_others(layers: Kind) -> None:
    found = today(layers)["all"]
    assert found > hit_rates(EVERY, layers, least_recently_used)["all"]
    assert found > hit_rates(EVERY, layers, without_calls(eviction.value))["all"]


@pytest.mark.parametrize("layers", LAYERS)
def test_a_client_that_says_that_it_comes_back_is_found_again(layers: Kind) -> None:
    assert hit_rates(EVERY, layers, retained="chat")["chat"] > today(layers)["chat"]


def test_no_more_is_found_than_if_all_returns_were_known() -> None:
    known = hit_rates(EVERY, "kv", returns=Returns(known=True))["all"]
    learned = hit_rates(EVERY, "kv", returns=Returns(known=False))["all"]
    assert known > max(learned, today("kv")["all"])


def test_published_pauses_are_drawn_as_often_as_published() -> None:
    drawn = random.Random(0)
    pauses = [CODEX_TOOLS.draw(drawn) for _ in range(4000)]
    for share, seconds in ((0.5, 0.626), (0.88, 10), (0.969, 60), (1, 3600)):
        assert sum(pause <= seconds for pause in pauses) / 4000 == pytest.approx(share, abs=0.02)
