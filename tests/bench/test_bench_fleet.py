"""What `bench fleet` counts; the run itself starts processes by the dozen: `tox -e fleet`."""

from __future__ import annotations

from mlx_provider_bench.fleet import Account, _compare, _count


def test_an_account_counts_later_turns_moves_and_who_got_whom() -> None:
    account = Account({0: ["a", "a", "b"], 1: ["a", "a", "a"], 2: ["b", "b", "b"]}, seconds=3.0)
    for later, cached in ((False, 90), (True, 60), (True, 90)):
        details = {"cached_tokens": cached}
        told = {"completion_tokens": 5, "prompt_tokens": 100, "prompt_tokens_details": details}
        _count(account, told, later=later)
    assert account.row(2) == {
        "engines": 2,
        "requests_per_second": 3.0,
        "tokens_per_second": 5.0,
        "hit_rate": 0.75,
        "agents_by_engine": [2, 1],
        "moves": 1,
    }


def test_more_engines_are_compared_with_the_fewest() -> None:
    rows = [{"engines": n, "requests_per_second": rate} for n, rate in ((1, 2.0), (4, 6.0))]
    _compare(rows)
    assert rows[1]["of_linear"] == {"measured": 0.75, "target": 0.9, "reached": False}
