"""What few bits of the KV cache cost: perplexity of one text, by echo with logprobs.

`pytest -rP` shows the figures; `docs/results.md` has them.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from mlx_provider.protocol.requests import ModelOptions

from .asking import Judge, Model

pytestmark = pytest.mark.real

ESSAY = Path(__file__).parents[1] / "data" / "real" / "essay.txt"


def told(model: Model, text: str, **options: object) -> list[float]:
    """Log-probability of each token of `text` but the first."""
    other = Model(model.client, model.folder, ModelOptions.model_validate(options))
    answer = other.ask([], max_tokens=1, messages=None, prompt=text, echo=True)
    values = [each.logprob for each in answer.logprobs[1:-1]]
    assert answer.logprobs[0].logprob is None
    return [value for value in values if value is not None]


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.fixture(scope="module")
def text() -> str:
    return ESSAY.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plain(model: Model, text: str) -> list[float]:
    return told(model, text)


def test_float32_has_the_perplexity_of_the_reference(
    plain: list[float], text: str, judge: Judge
) -> None:
    tokens = judge.tokenizer.encode(text)
    found = judge.reference.logprobs(tokens)[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.abs(found - plain).max() < 0.02
    print(f"float32: perplexity {perplexity(plain):.3f} over {len(plain)} tokens")
    assert perplexity(plain) == pytest.approx(math.exp(-found.mean()), rel=1e-3)


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.005), (4, 0.2)])
def test_kv_bits_raise_the_perplexity_only_within_a_limit(
    model: Model, plain: list[float], text: str, bits: int, limit: float
) -> None:
    found, base = perplexity(told(model, text, kv_bits=bits)), perplexity(plain)
    print(f"kv_bits {bits}: perplexity {found:.3f}, {found / base - 1:+.2%} against float32")
    assert abs(found / base - 1) < limit


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_with_kv_bits_get_equal_tokens_alone_and_together(model: Model, bits: int) -> None:
    """Until two tokens of nearly one probability part them, as in `tests/parity`."""
    quantised = Model(model.client, model.folder, ModelOptions(kv_bits=bits))
    said = [f"Write a sentence about the number {n}." for n in range(8)]
    alone = [quantised.ask(text, 24) for text in said]
    for again in (False, True):
        started = [quantised.start(text, 24) for text in said]
        for one, want in zip([each.read() for each in started], alone, strict=True):
            assert not again or one.cached > 10
            for mine, theirs in zip(one.logprobs, want.logprobs, strict=False):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=0.3)
                if mine.id != theirs.id:
                    break
