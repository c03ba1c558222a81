"""Which tokens of a prompt are kept, by the scores alone."""

from typing import Any

import numpy as np
import pytest

from mlx_provider.engine.sparse_prefill import CHUNK, FIRST, LAST, Nonsense, kept_places

ALWAYS = FIRST // CHUNK + LAST // CHUNK


def test_the_kept_share_counts_chunks_including_both_ends_of_the_prompt() -> None:
    scores = np.zeros(3200, np.float32)
    scores[1600:1632] = 1
    kept = kept_places(scores, 3200, 0.1)
    assert len(kept) == 10 * CHUNK
    assert kept == sorted(set(kept))
    assert set(range(FIRST)) | set(range(3200 - LAST, 3200)) | set(range(1600, 1632)) <= set(kept)


@pytest.mark.parametrize("tokens", [257, 300, 1000, 1023, 1025])
@pytest.mark.parametrize("share", [0.1, 0.33, 0.9])
def test_kept_tokens_are_bounded_and_include_the_end(tokens: int, share: float) -> None:
    kept = kept_places(np.random.default_rng(1).random(tokens), tokens, share)
    most = max(ALWAYS + 1, round(share * -(-tokens // CHUNK)))
    assert len(kept) <= most * CHUNK
    assert kept[-1] == tokens - 1
    assert all(at in set(kept) for at in range(tokens - LAST, tokens))


def test_a_high_score_keeps_its_chunk_and_the_neighbouring_one() -> None:
    scores = np.zeros(2000)
    scores[991] = 5.0  # the last of its chunk: the next one gets a part of it
    kept = set(kept_places(scores, 2000, 0.12))
    assert set(range(960, 1024)) <= kept


def test_equal_scores_keep_the_same_tokens_whatever_the_value() -> None:
    assert kept_places(np.ones(1000), 1000, 0.5) == [*range(11 * CHUNK), *range(27 * CHUNK, 1000)]


@pytest.mark.parametrize(
    "scores",
    [
        None,
        "important",
        [],
        np.ones(999),
        np.ones((1, 1000)),
        [float("nan")] * 1000,
        [0.0] * 999 + [float("inf")],
        ["a"] * 1000,
    ],
)
def test_invalid_scores_are_an_error(scores: Any) -> None:
    with pytest.raises((Nonsense, ValueError, TypeError)):
        kept_places(scores, 1000, 0.5)
