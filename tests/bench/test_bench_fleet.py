"""What `bench fleet` counts; the run itself starts processes by the dozen: `tox -e fleet`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fleet import (
    Account,
    Plan,
    _asked,
    _compare,
    _count,
    _simulated,
    _without_affinity,
    bench,
)
from mlx_provider.errors import BadRequest


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


def test_the_same_requests_are_simulated() -> None:
    account = Account()
    for number in range(4):
        for turn, prompt in enumerate((1000, 1030, 1060)):
            usage = {"prompt_tokens": prompt, "completion_tokens": 10}
            account.asked.append(_asked(0.2 * number, number, usage))
            account.prompt += prompt if turn else 0
    kept = round((1010 + 1040) / (1030 + 1060), 4)
    assert _simulated(Plan(), account, 2) == kept
    assert _simulated(Plan(policy="simple-shuffle"), account, 2) < kept


def test_another_policy_is_told_to_the_proxy_or_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="none of affinity, least-busy, simple-shuffle"):
        bench(Plan(policy="fastest"))
    path = tmp_path / "config.yaml"
    path.write_text("router_settings: {routing_strategy: least-busy, num_retries: 0}\n")
    _without_affinity(path, "simple-shuffle")
    settings = yaml.safe_load(path.read_text())["router_settings"]
    assert settings == {
        "routing_strategy": "simple-shuffle",
        "num_retries": 0,
        "optional_pre_call_checks": [],
    }
