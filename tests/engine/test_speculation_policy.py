"""Drafts on the curves of devices: they pay where they can, and cost next to nothing elsewhere."""

from __future__ import annotations

import pytest

from mlx_provider.engine.speculation import policy as policies
from mlx_provider.engine.speculation.policy import MISSED_PASSES, SAVED, Odds, Policy, RowOdds
from speculation_curves import (
    DEVICES,
    DRAFTERS,
    Luck,
    Outcome,
    copying,
    reachable,
    simulate,
    steady,
    turning,
)

SWEPT = ("M3 Max, hybrid 9B", "M5 Max, dense 8B")
"""Left to the sweep."""
each_device = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep if n in SWEPT else ()) for n in DEVICES]
)
SHARES = (0, 0.3, 0.6, 0.8, 0.95)
FLOOR = 0.97
"""Times the plain rate that no drafts may fall below."""
TARGET = 1.3
REWRITTEN = 2.0
"""Times the plain rate of a file that is written again with few changes."""
LEARNED = 45
"""Plain steps that may be lost until the policy knows rows and device."""


def decoded(name: str, rows: list[Luck], drafter: str = "MTP", **more: float) -> Outcome:
    return simulate(DEVICES[name], rows, DRAFTERS[drafter], steps=600, warm=300, **more)


@each_device
def test_no_width_is_slower_than_without(name: str) -> None:
    mixed = [steady(share) for share in SHARES]
    alone = [([row], drafter) for row in mixed[:3] for drafter in ("lookup", "draft model")]
    for rows, drafter in [
        *alone,
        ([steady(0)] * 2, "MTP"),
        ([steady(0.6)] * 4, "MTP"),
        (mixed + mixed[:3], "MTP"),
    ]:
        found = decoded(name, rows, drafter)
        assert found.ratio >= FLOOR
        assert found.learning <= LEARNED


@pytest.mark.parametrize(
    ("share", "other"),
    [
        *(pytest.param(n, n, marks=pytest.mark.sweep) for n in (0.3, 0.6)),
        (0.95, 0),
    ],
)
@each_device
def test_nor_are_sixteen_rows(name: str, share: float, other: float) -> None:
    rows = [steady(share), steady(other)] * 8
    found = simulate(DEVICES[name], rows, DRAFTERS["MTP"], steps=350, warm=200)
    assert found.ratio >= FLOOR
    assert found.learning <= LEARNED


@pytest.mark.parametrize("host", [0.001, 0.003])
@each_device
def test_one_row_gains_what_the_device_lets_it(name: str, host: float) -> None:
    """Two drafts of which 0.7 hold. An H200 waits for the host about as long as for a pass."""
    for drafter, guessing in DRAFTERS.items():
        best = reachable(DEVICES[name], 0.7, guessing, host, most=2)
        found = simulate(
            DEVICES[name], [steady(0.7)], guessing, host=host, policy=Policy(most=2), steps=1200
        )
        assert found.ratio >= (min(TARGET, 0.93 * best) if best >= TARGET else FLOOR), drafter


def test_devices_on_which_one_row_cannot_gain_as_much() -> None:
    """With 2 ms of the host, and of a draft model an eighth of the pass for each guess."""
    short = {
        (name, drafter)
        for name in DEVICES
        for drafter, guessing in DRAFTERS.items()
        if reachable(DEVICES[name], 0.7, guessing, 0.002, most=2) < TARGET
    }
    draft_models = {("M3 Max, 30B-A3B", "draft model")}
    beside_the_host = {("H200, dense 8B", drafter) for drafter in DRAFTERS}
    assert short == draft_models | beside_the_host | {("CPU, small", "draft model")}


@each_device
def test_a_text_that_changes_is_noticed(name: str) -> None:
    worse = [turning(0.9, 0, 900)]
    assert simulate(DEVICES[name], worse, DRAFTERS["MTP"], steps=900).ratio >= FLOOR
    better = [turning(0, 0.95, 300)]
    assert simulate(DEVICES[name], better, DRAFTERS["MTP"], steps=900).ratio >= 1.4


@each_device
def test_parts_that_are_copied_are_found_between_others(name: str) -> None:
    parts = copying(0.95, copied=80, written=160)
    assert decoded(name, [parts], "lookup").ratio >= FLOOR
    assert decoded(name, [parts] * 4, "lookup").ratio >= FLOOR
    drafter = DRAFTERS["lookup"]
    rewritten = simulate(DEVICES[name], [copying(0.99, 40, 4)], drafter)
    best = reachable(DEVICES[name], 0.99, drafter, 0.002, most=7)
    assert rewritten.ratio >= min(REWRITTEN, 0.88 * best)


@each_device
def test_a_row_without_luck_keeps_its_pace_beside_one_with(name: str) -> None:
    for rows in ([steady(0.95), steady(0)], [steady(0.95)] + [steady(0)] * 7):
        assert decoded(name, rows).slowest >= 0.72


def plain(drafts: int) -> float:
    """Seconds of a pass that is as long for any number of drafts."""
    return 0.01


def untrusted(count: int = 1) -> list[RowOdds]:
    return [RowOdds(missed=MISSED_PASSES) for _ in range(count)]


def test_tries_cost_their_allowance() -> None:
    policy, rows = Policy(aside=0.005), untrusted()
    tries = 0
    for _ in range(10_000):
        if policy.wanted(rows, 0, plain) != [0]:
            tries += 1
            policy.timed(0.005, 0, 1)
            policy.learn(rows[0], 1, 0)
        policy.rested(rows)
    assert tries == pytest.approx(10_000 * policies.ALLOWANCE + SAVED, rel=0.2)  # each costs one


def test_a_try_that_would_cost_more_than_can_be_saved_is_made_and_paid_for() -> None:
    policy, rows = Policy(aside=0.04), untrusted()
    assert policy.wanted(rows, 0, plain) == [1]
    assert policy.saved == pytest.approx(SAVED - 8)


def test_rows_are_tried_in_the_same_step() -> None:
    policy, rows = Policy(aside=0.001), untrusted(8)
    assert policy.wanted(rows, 0, plain) == [1] * 8


def test_nothing_is_tried_where_not_even_good_drafts_would_pay() -> None:
    rows = untrusted(4)
    assert Policy().wanted(rows, 0, lambda drafts: 0.01 * (1 + drafts)) == [0] * 4


@pytest.mark.parametrize(("saved", "longer"), [(SAVED, 1.0), (-SAVED, 0.0)])
def test_a_refused_trial_is_considered_again_some_steps_later(saved: float, longer: float) -> None:
    """It would not pay off, or the allowance does not permit it."""
    policy, rows = Policy(aside=0.005, saved=saved), untrusted(8)
    considered = 0
    for _ in range(10 * policies.REFUSED):
        asked: list[int] = []

        def seconds(drafts: int, asked: list[int] = asked) -> float:
            asked.append(drafts)
            return 0.01 * (1 + longer * drafts)

        assert not any(policy.wanted(rows, 0, seconds))
        policy.rested(rows)
        considered += any(asked)
    assert considered == 10


def test_drafts_that_hardly_ever_hold_are_not_compared() -> None:
    rows = [RowOdds() for _ in range(8)]
    for row in rows:
        row.odds.learn(0, 50)
    asked: list[int] = []

    def seconds(drafts: int) -> float:
        asked.append(drafts)
        return 0.01 * (1 + drafts)

    policy = Policy()
    policy.everyone.learn(0, 500)
    policy.wanted(rows, 0, seconds)
    for row in rows:
        row.rest = 1
    asked.clear()
    assert not any(policy.wanted(rows, 0, seconds))
    assert not any(asked)


def test_rows_that_cannot_draft_are_not_slowed_down_for_those_that_can() -> None:
    def wider(drafts: int) -> float:
        return 0.01 if drafts <= 2 else 0.02

    rows = [RowOdds()]
    rows[0].learn(20, 20)
    assert Policy().wanted(rows, 0, wider) == [7]
    assert Policy().wanted(rows, 3, wider) == [2]


def test_a_pass_that_compiled_kernels_tells_nothing() -> None:
    policy, rows = Policy(), [RowOdds()]
    wanted = policy.wanted(rows, 0, plain)
    policy.passed(sum(wanted), 50.0)
    policy.timed(0.5, 0.5, 7)
    policy.timed(1e-5, 1e-5, 1)
    assert (policy.aside, policy.per_draft) == (1e-5, 1e-5)
    assert policy.wanted(rows, 0, plain) == wanted


def test_passes_that_take_longer_than_the_curve_says_are_left_alone_and_tried_again() -> None:
    policy, rows = Policy(), [RowOdds()]
    counts = []
    for _ in range(4000):
        (count,) = policy.wanted(rows, 0, plain)
        policy.rested(rows)
        counts.append(count)
        if count:
            policy.learn(rows[0], count, count)
            policy.passed(count, 2.9 * count)  # three positions cost what three passes do
    late = [count for count in counts[100:] if count]
    assert 0 < len(late) < 100


def test_a_new_row_is_expected_to_be_like_the_others() -> None:
    policy = Policy()
    for _ in range(100):
        policy.learn(RowOdds(), 2, 0)
    shy = policy.wanted([RowOdds()], 0, lambda drafts: 0.01 + 0.002 * drafts)
    assert shy == [1]  # a try
    for _ in range(200):
        policy.learn(RowOdds(), 7, 7)
    assert policy.wanted([RowOdds()], 0, lambda drafts: 0.01 + 0.002 * drafts) == [7]


def test_certain_drafts_of_one_row_pay_only_if_other_rows_lose_less() -> None:
    policy = Policy()

    def seconds(drafts: int) -> float:
        return 0.020 * (1 + 0.01 * drafts)

    certain = [1.0] * 4
    assert policy.worthwhile(certain, 1, seconds) == 4
    assert policy.worthwhile(certain, 8, seconds) == 4
    assert policy.worthwhile(certain, 30, seconds) == 0
    assert policy.worthwhile([1.0, 0.001], 1, seconds) == 1, "what is uncertain costs more"
    policy.timed(0.060, 0.0, 0)
    assert policy.worthwhile([1.0], 1, seconds) == 0


def test_tokens_are_read_first_where_foretold_text_often_begins() -> None:
    policy, value, name = Policy(), Odds(), Odds()
    for at in range(40):
        policy.learn_beginning(value, begun=False)
        policy.learn_beginning(name, begun=at % 3 == 0)

    def seconds(drafts: int) -> float:
        return 0.020

    assert policy.reads_first(name, 1, seconds)
    assert not policy.reads_first(name, 8, seconds), "seven rows would wait"
    assert not policy.reads_first(value, 1, seconds)
    policy.timed(0.020, 0.0, 0)
    assert not policy.reads_first(name, 1, seconds), "the device would wait for long"
