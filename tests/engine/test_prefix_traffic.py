"""Hit rates of the real prefix cache with simulated traffic of agents."""

import pytest

from agent_traffic import Layers, scenarios, simulate

# percent of prompt tokens for (positional, hybrid) models, and token units stored for the latter
EXPECTED = {
    "6 users x 6 turns, 2k system": (92.5, 92.5, 81_000),
    "+ 500 thinking tokens, stripped": (85.3, 85.2, 198_000),
    "+ 30 % tokenised another way": (90.6, 88.8, 128_000),
    "16 users x 4 turns": (92.0, 92.0, 185_000),
    "agent 4 tasks x 10 steps, 6k system": (91.3, 91.3, 86_000),
    "agent, 30 % tokenised another way": (91.1, 91.0, 123_000),
    "8-way branch on 8k": (88.1, 88.1, 71_000),
    "long chat with side requests": (74.4, 74.4, 255_000),
    "5 questions about each of 3 documents": (80.9, 79.5, 140_000),
    "6 long texts behind one of 8k": (60.5, 48.4, 76_000),
}


def test_every_scenario_is_expected() -> None:
    assert scenarios().keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_hit_rates_of_simulated_traffic_reach_the_expected_values(name: str) -> None:
    requests = scenarios()[name]
    positional, hybrid, units = EXPECTED[name]
    kinds: tuple[Layers, ...] = ("kv", "hybrid")
    plain, mixed = (simulate(name, requests, kind) for kind in kinds)
    assert 100 * plain.hit_rate >= positional
    assert 100 * mixed.hit_rate >= hybrid
    assert mixed.units <= units


def test_a_tight_budget_costs_little() -> None:
    """With half the budget, finished tasks and side requests are evicted, not active sessions."""
    for name in ("agent 4 tasks x 10 steps, 6k system", "long chat with side requests"):
        free = simulate(name, scenarios()[name], "hybrid")
        tight = simulate(name, scenarios()[name], "hybrid", budget_units=free.units // 2)
        assert tight.hit_rate == free.hit_rate
        assert tight.units <= free.units // 2
