"""`bench fleet`, small, from its start to its table."""

from __future__ import annotations

from fleet import Plan, bench


def test_two_engines_take_all_agents_and_keep_their_prefixes() -> None:
    plan = Plan(engines=(1, 2), agents=4, turns=3, words=200, prefill=0.2, token=0.002)
    one, two = bench(plan)["rows"]
    assert (one["engines"], two["engines"]) == (1, 2)
    assert one["moves"] == two["moves"] == 0
    assert min(one["hit_rate"], two["hit_rate"]) > 0.9
    assert sum(two["agents_by_engine"]) == 4
