"""Sampling: each row by its own parameters, equal in any batch."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.engine.execution.sampler import (
    BINS,
    BLOCK,
    MANY,
    RANGE,
    best,
    draw,
    threshold,
    units,
)
from mlx_provider.engine.request import Row, SamplingParams
from mlx_provider.testing.driver import new_request
from tolerances import logprob_tolerance

VOCAB = 1000


def row(*, tokens: tuple[int, ...] = (), logprobs: int | None = None, **params: Any) -> Row:
    request = new_request([1, 2, 3], params=SamplingParams(**params), logprobs=logprobs)
    request.rows[0].tokens = list(tokens)
    return request.rows[0]


def logits(seed: int, rows: int, scale: float = 3.0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, scale, (rows, VOCAB)).astype("f4"))


def one(values: mx.array, chosen: Row) -> int:
    return int(draw(values[None], [chosen], [None]).tokens.item())


PARAMS = st.builds(
    dict,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 50.0]),
    top_p=st.sampled_from([0.1, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 300]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
)


@given(params=st.lists(PARAMS, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_row_draws_the_same_tokens_in_any_batch(params: list[dict[str, Any]], seed: int) -> None:
    values = logits(seed, len(params))
    rows = [row(tokens=(5, 5, i), **p) for i, p in enumerate(params)]
    together = draw(values, rows, [None] * len(rows)).tokens.tolist()
    assert together == [one(values[i], r) for i, r in enumerate(rows)]


def test_greedy_takes_the_maximum() -> None:
    values = logits(0, 1)
    assert one(values[0], row(temperature=0)) == int(mx.argmax(values[0]).item())


def test_a_seed_repeats_and_positions_differ() -> None:
    values = logits(1, 1, scale=0.1)[0]
    at = [row(temperature=1, seed=9, tokens=(0,) * i) for i in range(20)]
    drawn = [one(values, r) for r in at]
    assert drawn == [one(values, r) for r in at]
    assert len(set(drawn)) > 10


def kept_by_definition(values: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """top-k, then top-p of the rest, then min-p, directly from their definitions."""
    order = np.argsort(-values)[: top_k or None]
    probs = np.exp(values[order] - values[order].max())
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    return {int(t) for t, p, b in zip(order, probs, before, strict=True)
            if b < top_p and p >= min_p * probs[0]}  # fmt: skip


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "scale"),
    [(5, 1, 0, 3), (0, 0.7, 0, 3), (0, 1, 0.2, 3), (40, 0.8, 0.05, 2), (400, 1, 0, 0.01),
     (0, 0.9, 0, 0.01), (400, 0.8, 0.5, 0.3), (0, 0.8, 0.1, 1), (200, 0.9, 0, 3)],
)  # fmt: skip
def test_only_tokens_that_the_definitions_permit_are_drawn(
    top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    values = logits(2, 1, scale)[0]
    allowed = kept_by_definition(np.array(values), top_k, top_p, min_p)
    if scale < 0.1:
        assert len(allowed) > MANY
    params = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = {one(values, row(seed=s, **params)) for s in range(300)}
    assert drawn <= allowed
    assert len(drawn) > min(len(allowed), 100) // 2


def test_draws_follow_the_probabilities() -> None:
    values = mx.array([0.0, np.log(2.0), np.log(5.0), *[-100.0] * (VOCAB - 3)])
    for extra in ({}, {"top_k": 3}):
        drawn = [one(values, row(temperature=1, seed=s, **extra)) for s in range(800)]
        shares = np.bincount(drawn, minlength=3)[:3] / 800
        assert np.abs(shares - np.array([1, 2, 5]) / 8).max() < 0.06


def test_penalties_bias_and_min_tokens() -> None:
    values = mx.zeros((VOCAB,))
    values[7] = 2.0
    values[8] = 1.9
    assert one(values, row(temperature=0)) == 7
    assert one(values, row(temperature=0, repetition_penalty=1.2, tokens=(7,))) == 8
    assert one(values, row(temperature=0, presence_penalty=0.2, tokens=(7,))) == 8
    assert one(values, row(temperature=0, frequency_penalty=0.06, tokens=(7, 7))) == 8
    assert one(values, row(temperature=0, frequency_penalty=0.04, tokens=(7, 7))) == 7
    assert one(values, row(temperature=0, logit_bias=((7, -100.0),))) == 8
    early = row(temperature=0, tokens=(1,))
    early.request.stop_tokens, early.request.min_tokens = frozenset({7}), 2
    assert one(values, early) == 8


def test_a_mask_allows_only_its_tokens() -> None:
    bits = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
    for token in (33, 700):
        bits[token // 32] |= np.uint32(1 << (token % 32))
    values = logits(3, 2)
    rows = [row(temperature=1, seed=s) for s in range(2)]
    free, bound = draw(values, rows, [None, bits]).tokens.tolist()  # type: ignore[misc]
    assert bound in (33, 700)
    assert free == one(values[0], rows[0])


def test_logprobs_are_those_of_the_raw_logits() -> None:
    values = logits(4, 3)
    rows = [row(temperature=0), row(temperature=2, seed=1, logprobs=4, top_k=5), row(temperature=0)]
    drawn = draw(values, rows, [None] * 3)
    assert drawn.logprobs is not None
    raw = np.array(values[1]) - np.logaddexp.reduce(np.array(values[1], dtype=np.float64))
    token = drawn.tokens.tolist()[1]  # type: ignore[index]
    assert drawn.logprobs.drawn.item() == pytest.approx(raw[token], abs=logprob_tolerance())
    assert drawn.logprobs.top_ids.tolist()[0] == np.argsort(-raw)[:4].tolist()  # type: ignore[index]


@pytest.mark.parametrize("count", [1, 20, 64])
@pytest.mark.parametrize("vocab", [50, 64 * BLOCK * 3, 64 * BLOCK * 3 + 17])
def test_the_best_tokens_are_found_without_sorting_all(vocab: int, count: int) -> None:
    values = np.random.default_rng(count).normal(size=(3, vocab)).astype("f4")
    values[1, vocab // 2 :] = -np.inf  # as a grammar leaves them
    found = np.array(best(mx.array(values), count))
    wanted = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    assert np.array_equal(
        np.take_along_axis(values, found, -1), np.take_along_axis(values, wanted, -1)
    )


@pytest.mark.parametrize("spread", [1e-3, 0.2, 2.0, 12.0])
def test_a_threshold_leaves_the_required_probability(spread: float) -> None:
    """And no value below it, except values that count as equal."""
    values = np.random.default_rng(0).normal(0, spread, (5, 5000)).astype("f4")
    values[:, 3000:] = -np.inf  # as a grammar leaves them
    weights = np.exp(values - values.max(-1, keepdims=True), dtype="f8")
    weights /= weights.sum(-1, keepdims=True)
    wanted = [0.0, 0.1, 0.5, 0.95, 1.5]
    found = threshold(
        mx.array(values), units(mx.array(weights, mx.float32)), units(mx.array(wanted)[:, None])
    )
    kept = values >= np.array(found)
    for own, share, mass, row in zip(kept, wanted, weights, values, strict=True):
        count = np.sum(np.cumsum(np.sort(mass)[::-1]) < share) + 1
        least = np.sort(row)[::-1][min(count, 3000) - 1]
        assert (mass * own).sum() >= min(share, 1) - 1e-5
        if share <= 1:
            assert np.all(row[own] >= least - 2 * RANGE / BINS**2)


def test_penalties_count_the_tokens_of_the_reply() -> None:
    values = mx.zeros((VOCAB,))
    values[7], values[8], values[9] = 2.0, 1.95, 1.9
    growing = row(temperature=0, presence_penalty=0.06)
    written = []
    for _ in range(4):
        written.append(one(values, growing))
        growing.tokens.append(written[-1])
    assert written == [7, 8, 7, 7]
    again = row(temperature=0, presence_penalty=0.06, tokens=tuple(written))
    assert one(values, again) == one(values, growing), "as if it had been counted at once"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.95}, {"top_k": 100},
        {"top_k": 1000}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2},
        {"temperature": 0.0, "presence_penalty": 1.0}, {"logit_bias": ((5, 1.0),)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("logprobs", [None, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_step_is_built_without_waiting_for_the_device(
    params: dict[str, Any], logprobs: int | None
) -> None:
    """A computed array would be in memory: the logits alone need 16 MB."""
    rows = [row(tokens=(5, 5, i), logprobs=logprobs, **params) for i in range(40)]
    values = mx.random.normal((40, 100_000), key=mx.random.key(0))
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    drawn = draw(values, rows, [None] * 40)
    allowed = 2**20 + 40 * 100_000 * bool(rows[0].history)  # the set of prompt tokens
    assert mx.get_peak_memory() - before < allowed
    mx.eval(drawn.arrays)
    assert mx.get_peak_memory() - before > 15_000_000
