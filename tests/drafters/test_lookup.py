"""Prompt lookup by itself: what it finds, and what that takes."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.records import DraftRow
from mlx_provider_drafters.lookup import LONGEST, MIN_MATCH_TOKENS, PIECE, Lookup, Text

WORDS = st.lists(st.integers(0, 3), min_size=20, max_size=60)


def guess(tokens: Sequence[int], wanted: int = 7) -> Sequence[int] | None:
    (found,) = Lookup().propose([DraftRow(list(tokens), wanted=wanted)])
    return found


def test_lookup_drafts_the_tokens_after_an_earlier_match() -> None:
    said = [*range(100, 112), 7, 8, 9, 100, 101, 102, 103, 104]
    assert guess(said) == [105, 106, 107]  # as many as the match is beyond two tokens


def test_lookup_drafts_at_most_the_wanted_number() -> None:
    assert guess([*range(20), 90, *range(12)], wanted=2) == [12, 13]


@pytest.mark.parametrize("tokens", [[], [4], [4, 4], [1, 2, 3], [1, 2, 7, 1, 2], list(range(99))])
def test_lookup_without_an_earlier_match_drafts_nothing(tokens: list[int]) -> None:
    assert guess(tokens) == ()


def test_lookup_uses_the_longest_match_and_the_last_of_equal_ones() -> None:
    longest = [1, 2, 3, 4, 5, 50]
    shorter = [9, 3, 4, 5, 60]
    assert guess([*longest, *shorter, 2, 3, 4, 5], 1) == [50]
    assert guess([*shorter, *longest, 2, 3, 4, 5], 1) == [50]
    assert guess([*longest, *longest[:-1], 51, 7, 3, 4, 5], 1) == [51]


def test_lookup_continues_a_repeating_text() -> None:
    assert guess([1, 2, 3] * 9) == [1, 2, 3, 1, 2, 3, 1]
    assert guess([5] * 12) == [5] * 7


def test_lookup_follows_the_copied_place_although_a_later_one_matches() -> None:
    """The later place has the same words for longer than is compared, and another end."""
    first, second = [1, 2, 3, *range(100, 190)], [*range(100, 150), 7]
    lookup, row = Lookup(), DraftRow([*first, *second, 90, 1, 2, 3], wanted=7)
    for at in range(100, 180):
        (drafts,) = lookup.propose([row])
        assert drafts is not None
        assert list(drafts) == list(range(at, at + len(drafts)))
        row.tokens.append(at)


@given(text=WORDS, parts=st.lists(st.integers(1, 9), min_size=60, max_size=60))
def test_lookup_matches_of_a_text_indexed_in_pieces_equal_those_of_a_plain_search(
    text: list[int], parts: list[int]
) -> None:
    def length(place: int) -> int:
        both = zip(reversed(text[:place]), reversed(text), strict=False)
        return next((i for i, (a, b) in enumerate(both) if a != b), place)

    text_so_far = Text()
    for start, stop in pairwise(np.cumsum([0, *parts]).tolist()):
        text_so_far.extend(text[start:stop])
    assert text_so_far.size == len(text)
    lengths = [min(LONGEST, length(place)) for place in range(len(text))]
    found = text_so_far.longest()
    if found is None:
        assert max(lengths, default=0) < MIN_MATCH_TOKENS
    else:
        assert found.length == max(lengths)
        assert found.place == max(p for p, each in enumerate(lengths) if each == found.length)


def test_a_long_prompt_is_indexed_in_pieces_within_8_bytes_a_token() -> None:
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 9999, 4 * PIECE)]
    row, lookup = DraftRow([*tokens, *tokens[70:90]], wanted=3), Lookup()
    calls = 0
    while (found := lookup.propose([row])[0]) is None:
        calls += 1
        assert row.state.text.size <= calls * PIECE
    assert calls == 4
    assert found == tokens[90:93]
    assert row.state.text.nbytes <= 8 * len(tokens)


def test_rows_share_the_tokens_that_one_call_may_index() -> None:
    rows = [DraftRow(list(range(PIECE - 9)), wanted=1), DraftRow([1, 2, 3] * 9, wanted=1)]
    lookup = Lookup()
    assert lookup.propose(rows) == [(), None]
    assert lookup.propose(rows) == [(), [1]]
