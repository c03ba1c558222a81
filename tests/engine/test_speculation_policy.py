"""Drafts on the curves of devices: they are faster where possible, and cost little elsewhere."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from mlx_provider.engine.speculation.policy import (
    ALLOWANCE,
    KNOWN_TEXT,
    LONGEST_REST,
    MISSED_PASSES,
    Kind,
    Policy,
    RowAcceptance,
)
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

each_device = pytest.mark.parametrize("name", DEVICES)
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
def test_drafts_of_any_width_are_not_slower_than_none(name: str) -> None:
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
    [*(pytest.param(n, n, marks=pytest.mark.sweep) for n in (0.3, 0.6)), (0.95, 0)],
)
@each_device
def test_drafts_of_sixteen_rows_are_not_slower_than_none(
    name: str, share: float, other: float
) -> None:
    rows = [steady(share), steady(other)] * 8
    found = simulate(DEVICES[name], rows, DRAFTERS["MTP"], steps=350, warm=200)
    assert found.ratio >= FLOOR
    assert found.learning <= LEARNED


@pytest.mark.parametrize("host", [0.003, pytest.param(0.001, marks=pytest.mark.sweep)])
@each_device
def test_one_row_gains_as_much_as_the_device_permits(name: str, host: float) -> None:
    """Two drafts, acceptance 0.7."""
    for drafter, guessing in DRAFTERS.items():
        best = reachable(DEVICES[name], 0.7, guessing, host, most=2)
        found = simulate(
            DEVICES[name], [steady(0.7)], guessing, host=host, policy=Policy(most=2), steps=1200
        )
        assert found.ratio >= (min(TARGET, 0.93 * best) if best >= TARGET else FLOOR), drafter


@each_device
def test_the_policy_notices_when_the_text_changes(name: str) -> None:
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
def test_a_row_without_accepted_drafts_keeps_its_pace_beside_one_with_them(name: str) -> None:
    for rows in ([steady(0.95), steady(0)], [steady(0.95)] + [steady(0)] * 7):
        assert decoded(name, rows).slowest >= 0.72


def plain(drafts: int) -> float:
    """Seconds of a pass that takes equally long with any number of drafts."""
    return 0.01


ALONE: Kind = frozenset({0})


def parked(count: int = 1) -> list[RowAcceptance]:
    return [RowAcceptance(missed=MISSED_PASSES) for _ in range(count)]


def counts(
    policy: Policy, rows: list[RowAcceptance], others: int, seconds: Callable[[int], float]
) -> list[int]:
    """The number of drafts of each row, with one drafter."""
    asked = policy.choose([[row] for row in rows], others, seconds)
    return [sum(ask.drafts for ask in asks) for asks in asked]


def test_trials_take_a_small_share_of_the_time() -> None:
    policy, rows = Policy(), parked()
    policy.costs[ALONE].add_times(0.005, 0, 0)
    tries = 0
    for _ in range(10_000):
        if counts(policy, rows, 0, plain) != [0]:
            tries += 1
            policy.costs[ALONE].add_times(0.005, 0, 1)
            policy.learn(0, rows[0], 1, 0)
        policy.end_step()
    assert 0 < 0.5 * tries <= 10_000 * ALLOWANCE + 10  # each costs half a step


def test_rows_are_tried_in_the_same_step() -> None:
    policy, rows = Policy(), parked(8)
    policy.costs[ALONE].add_times(0.001, 0, 0)
    assert counts(policy, rows, 0, plain) == [1] * 8


def test_nothing_is_tried_if_even_good_drafts_would_not_pay() -> None:
    """And nothing is decided in the steps until they are considered again."""
    policy, rows, considered = Policy(), parked(4), 0
    for _ in range(320):
        asked: list[int] = []

        def seconds(drafts: int, asked: list[int] = asked) -> float:
            asked.append(drafts)
            return 0.01 * (1 + drafts)

        assert not any(counts(policy, rows, 0, seconds))
        policy.end_step()
        considered += any(asked)
    assert considered == 40


def test_rows_that_cannot_draft_are_not_slowed_down_by_those_that_can() -> None:
    def wider(drafts: int) -> float:
        return 0.01 if drafts <= 2 else 0.02

    rows = [RowAcceptance()]
    rows[0].learn(20, 20)
    assert counts(Policy(), rows, 0, wider) == [7]
    assert counts(Policy(), rows, 3, wider) == [2]


def test_a_pass_that_compiled_kernels_is_no_measurement() -> None:
    policy, rows = Policy(), [RowAcceptance()]
    wanted = counts(policy, rows, 0, plain)
    policy.costs[ALONE].add_pass(sum(wanted), 50.0)
    policy.costs[ALONE].add_times(0.5, 0.5, 7)
    policy.costs[ALONE].add_times(1e-5, 1e-5, 1)
    assert (policy.costs[ALONE].aside, policy.costs[ALONE].per_draft) == (1e-5, 1e-5)
    assert counts(policy, rows, 0, plain) == wanted


def test_a_width_that_is_slower_than_its_curve_is_avoided_and_tried_again() -> None:
    policy, rows = Policy(), [RowAcceptance()]
    found = []
    for _ in range(4000):
        (count,) = counts(policy, rows, 0, plain)
        policy.end_step()
        found.append(count)
        if count:
            policy.learn(0, rows[0], count, count)
            # three positions cost as much as three passes
            policy.costs[ALONE].add_pass(count, 2.9 * count)
    late = [count for count in found[100:] if count]
    assert 0 < len(late) < 100


def test_a_new_row_is_expected_to_accept_drafts_like_the_others() -> None:
    policy = Policy()
    for _ in range(100):
        policy.learn(0, RowAcceptance(), 2, 0)
    shy = counts(policy, [RowAcceptance()], 0, lambda drafts: 0.01 + 0.002 * drafts)
    assert shy == [1]  # a trial
    for _ in range(200):
        policy.learn(0, RowAcceptance(), 7, 7)
    assert counts(policy, [RowAcceptance()], 0, lambda drafts: 0.01 + 0.002 * drafts) == [7]


def test_certain_drafts_of_one_row_pay_only_if_other_rows_lose_less() -> None:
    policy = Policy()

    def seconds(drafts: int) -> float:
        return 0.020 * (1 + 0.01 * drafts)

    certain, worthwhile = [1.0] * 4, policy.known_drafts
    assert worthwhile(certain, 1, seconds) == 4
    assert worthwhile(certain, 8, seconds) == 4
    assert worthwhile(certain, 30, seconds) == 0
    assert worthwhile([1.0, 0.001], 1, seconds) == 1, "what is uncertain costs more"
    policy.costs[KNOWN_TEXT].add_times(0.060, 0.0, 0)
    assert worthwhile([1.0], 1, seconds) == 0


# -- several drafters

HEAD, LOOKUP = 0, 1


def settled(
    policy: Policy,
    held: Sequence[Sequence[int]],
    *,
    steps: int = 300,
    aside: Mapping[Kind, float] | None = None,
    width: float = 0.0,
) -> list[Counter[int]]:
    """The number of calls of each drafter for each row in the last two thirds of the steps.

    held: for each row, the accepted drafts of each drafter; aside: seconds that the device waits,
    by the drafters of a pass; width: seconds that a pass takes longer for each draft.
    """
    rows: list[list[RowAcceptance | None]] = [[RowAcceptance() for _ in row] for row in held]
    asked: list[Counter[int]] = [Counter() for _ in rows]
    for step in range(steps):
        wanted = policy.choose(rows, 0, lambda drafts: 0.01 + width * drafts)
        policy.end_step()
        for at, asks in enumerate(wanted):
            for source, drafts in asks[:1]:
                odds = rows[at][source]
                assert odds is not None
                policy.learn(source, odds, drafts, min(held[at][source], drafts))
                if 3 * step > steps:
                    asked[at][source] += 1
        kind = frozenset(asks[0].source for asks in wanted if asks)
        if kind and aside:
            policy.costs[kind].add_times(aside[kind], 0.0, 0)
    return asked


def mostly(asked: Counter[int], source: int) -> bool:
    return asked[source] > 0.9 * asked.total() > 0


def test_the_duration_of_a_pass_is_estimated_once_in_a_step() -> None:
    asked: Counter[int] = Counter()

    def seconds(drafts: int) -> float:
        asked[drafts] += 1
        return 0.01 + 0.0001 * drafts

    rows: list[list[RowAcceptance | None]] = [[RowAcceptance(), RowAcceptance()] for _ in range(4)]
    assert all(Policy().choose(rows, 0, seconds))
    assert max(asked) == 4 * 7
    assert {*asked.values()} == {1}


def test_each_row_has_the_drafter_whose_drafts_are_accepted() -> None:
    good_head, good_lookup = [5, 1], [1, 5]
    for held, source in ((good_head, HEAD), (good_lookup, LOOKUP)):
        (asked,) = settled(Policy(), [held])
        assert mostly(asked, source)
        assert 0 < asked[1 - source] <= 200 / LONGEST_REST + 1, (
            "the other one is tried now and then"
        )
    first, second = settled(Policy(), [good_head, good_lookup])
    assert mostly(first, HEAD)
    assert mostly(second, LOOKUP)


def test_a_drafter_that_does_not_pay_is_called_only_in_trials() -> None:
    (asked,) = settled(Policy(), [[0, 0]], steps=3000)
    for source in (HEAD, LOOKUP):
        assert 0 < asked[source] <= 2000 / LONGEST_REST + 1


def test_a_lookup_is_used_in_each_part_of_a_reply_that_is_copied_beside_a_poor_head() -> None:
    policy, row = Policy(), [RowAcceptance(), RowAcceptance()]
    tokens = accepted = 0
    while tokens < 2000:
        (asks,) = policy.choose([row], 0, lambda drafts: 0.01 * (1 + 0.03 * drafts))
        policy.end_step()
        held = 0
        for source, drafts in asks:
            held = drafts if source == LOOKUP and tokens // 100 % 2 else 0
            policy.learn(source, row[source], drafts if held or source == HEAD else 0, held)
            if held or source == HEAD:  # the head always has a guess
                break
        tokens, accepted = tokens + 1 + held, accepted + held
    assert accepted > 700, "of 1000 tokens that are copied"


def test_a_drafter_that_delays_all_rows_must_gain_more() -> None:
    """Both have nearly the same acceptance, so that the wait decides."""
    alike = [[2, 3]]
    waits = {frozenset({LOOKUP}): 0.02, frozenset({HEAD}): 0.0}
    (asked,) = settled(Policy(), alike, aside=waits)
    assert mostly(asked, HEAD)
    (asked,) = settled(Policy(), alike)
    assert mostly(asked, LOOKUP)


def test_a_row_is_not_slowed_down_by_the_drafter_of_another_row() -> None:
    """A pass with drafts of both has its own measurement."""
    rows = [[5, 0]] * 7 + [[0, 5]]
    both = {frozenset({HEAD}): 0.0, frozenset({LOOKUP}): 0.03, frozenset({HEAD, LOOKUP}): 0.03}
    *heads, last = settled(Policy(), rows, aside=both)
    assert all(mostly(asked, HEAD) for asked in heads)
    assert not mostly(last, LOOKUP)


def test_a_second_drafter_is_used_if_the_better_one_has_no_guess() -> None:
    policy, row = Policy(), [RowAcceptance(), RowAcceptance()]
    for _ in range(20):
        policy.learn(LOOKUP, row[LOOKUP], 7, 7)
        policy.learn(HEAD, row[HEAD], 2, 1)
    row[HEAD].due = 1  # no trial is due
    (asks,) = policy.choose([row], 0, plain)
    assert [ask.source for ask in asks] == [LOOKUP, HEAD]
    assert asks[0].drafts >= asks[1].drafts > 0
