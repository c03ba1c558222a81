"""What was said before is foreseen, by the same tenant alone, and in bounded memory."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_provider_recall import keeps, mlx_drafters
from mlx_provider_recall.automaton import COUNTED, EMPTY, Automaton
from mlx_provider_recall.recall import TOKEN_BYTES, Recall

from mlx_provider.records import DraftOptions, DraftRow

PROMPT = list(range(100, 120))
REPLY = [7, 8, 9, 7, 8, 1, 2, 3, 4, 5, 6, 10, 11, 12]


def followers(texts: Sequence[list[int]], run: list[int]) -> list[int]:
    """Each token that stands behind a run, as often as it does."""
    size = len(run)
    return [
        text[at + size]
        for text in texts
        for at in range(len(text) - size)
        if text[at : at + size] == run
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=COUNTED))
def test_the_longest_seen_suffix_and_its_next_token_are_found(said: list[tuple[int, int]]) -> None:
    """Three texts that grow in any order, in an alphabet so small that much is repeated."""
    automaton = Automaton()
    texts: list[list[int]] = [[], [], []]
    states = [EMPTY] * 3
    for who, token in said:
        texts[who].append(token)
        states[who] = automaton.append(states[who], token)
        own = texts[who]
        runs = [own[at:] for at in range(len(own))]
        known = next((found for run in runs if (found := followers(texts, run))), [])
        state = automaton.before(states[who], 1)
        assert (state is None) == (not known)
        if state is not None:
            best, _, share = automaton.likeliest(state)
            assert known.count(best) == max(map(known.count, known))
            assert share == pytest.approx(known.count(best) / len(known))


def say(recall: Recall, row: DraftRow, reply: Sequence[int]) -> tuple[int, int]:
    """Let a row say it; passes, and drafts that did not hold."""
    passes = wrong = at = 0
    while at < len(reply):
        (drafts,) = recall.propose([row])
        assert len(drafts) <= row.wanted
        held = 0
        while held < len(drafts) and drafts[held] == reply[min(at + held, len(reply) - 1)]:
            held += 1
        wrong += len(drafts) - held
        row.tokens.extend(reply[at : at + held + 1])
        passes, at = passes + 1, at + held + 1
    return passes, wrong


def test_a_repeated_request_drafts_its_earlier_reply() -> None:
    recall = Recall()
    assert say(recall, DraftRow([*PROMPT], wanted=4), REPLY)[0] > len(REPLY) - 3
    passes, wrong = say(recall, DraftRow([*PROMPT], wanted=4), REPLY)
    assert passes <= -(-len(REPLY) // 5) + 1
    assert wrong <= 4


def test_a_continuation_seen_once_among_many_is_not_drafted() -> None:
    recall, drafted = Recall(), []
    for last in range(3, 9):
        row = DraftRow([1, 2, 3, 4], wanted=1)
        drafted += recall.propose([row])
        row.tokens.append(40 + last)
        recall.propose([row])
    assert recall.propose([DraftRow([1, 2, 3, 4], wanted=4)]) == [[]]
    assert drafted[:2] == [[], [43]]


def test_tokens_of_one_tenant_are_never_drafted_for_another() -> None:
    recall = Recall()
    say(recall, DraftRow([*PROMPT], wanted=4, salt="one"), REPLY)
    assert recall.propose([DraftRow([*PROMPT], wanted=4, salt="two")]) == [[]]
    assert recall.propose([DraftRow([*PROMPT], wanted=4)]) == [[]]
    assert recall.propose([DraftRow([*PROMPT], wanted=4, salt="one")]) == [REPLY[:4]]


def test_interleaved_rows_are_remembered_separately() -> None:
    recall = Recall()
    rows = [DraftRow([*PROMPT, who], wanted=3) for who in (0, 1)]
    for at in range(6):
        recall.propose(rows)
        for who, row in enumerate(rows):
            row.tokens.append(20 + at + 100 * who)
    recall.propose(rows)
    again = [DraftRow([*PROMPT, who], wanted=3) for who in (0, 1)]
    assert recall.propose(again) == [[20, 21, 22], [120, 121, 122]]


def test_memory_stays_bounded_and_a_forgotten_row_still_gets_drafts() -> None:
    recall = Recall(most=200)
    row = DraftRow([*PROMPT], wanted=3)
    for turn in range(50):
        for token in range(12):
            (drafts,) = recall.propose([row])
            assert len(drafts) <= 3
            row.tokens.append(token + 20 * (turn % 2))
        assert recall.tokens <= 200
    assert recall.propose([row]) == [[0, 1, 2]]


def test_the_drafter_reports_the_memory_that_its_room_permits(tmp_path) -> None:
    (drafter,) = mlx_drafters()
    small = drafter.start(tmp_path, None, DraftOptions(room=100 * TOKEN_BYTES + 1))
    assert keeps(small) == 100 * TOKEN_BYTES
    assert drafter.keeps(drafter.start(tmp_path, None, DraftOptions())) < 100e6
    assert drafter.automatic == 0


def test_a_token_takes_no_more_memory_than_token_bytes() -> None:
    import random
    import tracemalloc

    dice = random.Random(0)
    tracemalloc.start()
    try:
        before, automaton, state = tracemalloc.get_traced_memory()[0], Automaton(), EMPTY
        for _ in range(5000):
            state = automaton.append(state, dice.randrange(300))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken < TOKEN_BYTES * automaton.tokens
