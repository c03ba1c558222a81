"""What a smaller model finds to matter in a prompt, against its attention written out here."""

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import ScoresPrompts
from mlx_provider.testing.driver import new_request, run
from mlx_provider_drafters import prompt_scoring
from mlx_provider_drafters.draft_model import DraftModel
from mlx_provider_drafters.lookup import Lookup
from mlx_provider_drafters.prompt_scoring import LOOKS, PIECE, SHALLOW, passes, piece
from tolerances import logprob_tolerance

from .scores import thinning

TEXT = [20 + (i * i * 31 + i // 7) % 300 for i in range(900)]


@pytest.fixture(scope="module")
def small(folder: Callable[..., Path]) -> TextModel:
    return load_text(folder("qwen3", seed=4, num_hidden_layers=2), LoadOptions())


def scored(scorer: DraftModel, tokens: Sequence[int]) -> tuple[NDArray[np.float32], int]:
    scoring, pieces = scorer.scoring(tokens), 1
    while (found := scoring.advance()) is None:
        pieces += 1
    return found, pieces


def written_out(model: TextModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """One pass over everything that was looked from, layer by layer."""
    inner, looked = model.model.model, list(tokens)
    for _ in range(LOOKS - 1):
        looked.append(int(mx.argmax(model.model(mx.array(looked)[None])[0, -1]).item()))
    hidden, most = inner.embed_tokens(mx.array(looked)[None]), np.zeros((LOOKS, len(tokens)))
    n = len(looked)
    for layer in inner.layers:
        own, x = layer.self_attn, layer.input_layernorm(hidden)
        q, k = (
            own.rope(norm(proj(x).reshape(1, n, heads, -1)).transpose(0, 2, 1, 3))
            for norm, proj, heads in (
                (own.q_norm, own.q_proj, own.n_heads),
                (own.k_norm, own.k_proj, own.n_kv_heads),
            )
        )
        k = mx.repeat(k, own.n_heads // own.n_kv_heads, axis=1)
        past = mx.arange(n)[:, None] >= mx.arange(n)
        weights = mx.softmax(mx.where(past, (q * own.scale) @ k.swapaxes(2, 3), -mx.inf), axis=-1)
        seen = np.array(weights[0, :, len(tokens) - 1 :, : len(tokens)])
        most = np.maximum(most, seen.max(axis=0))
        hidden = layer(hidden, "causal", None)
    found: NDArray[np.float32] = most.mean(axis=0).astype(np.float32)
    return found


def test_the_score_of_a_token_is_its_highest_attention(small: TextModel) -> None:
    scorer = DraftModel(small, 384)
    assert isinstance(scorer, ScoresPrompts)
    assert not isinstance(Lookup(), ScoresPrompts)
    found, pieces = scored(scorer, TEXT[:600])
    assert found.shape == (600,)
    assert np.allclose(found, written_out(small, TEXT[:600]), atol=logprob_tolerance())
    assert pieces == 2 + LOOKS == len(passes(600))
    assert passes(600)[:3] == [(512, 0), (87, 512), (1, 599)]


def test_deeper_pieces_are_shorter_and_piece_sizes_do_not_change_scores(
    small: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deeper, the shorter: attention takes longer there."""
    ends, at = [], 0
    while at < 40_000:
        at += piece(at)
        ends.append(piece(at))
    assert sorted(set(ends)) == [PIECE // 4, PIECE // 2, PIECE]
    assert piece(SHALLOW - 1) == PIECE == 2 * piece(SHALLOW) == 4 * piece(10 * SHALLOW)
    scorer = DraftModel(small, 384)
    whole, _ = scored(scorer, TEXT)
    monkeypatch.setattr(prompt_scoring, "PIECE", 128)
    parts, pieces = scored(scorer, TEXT)
    assert pieces == 8 + LOOKS
    assert np.allclose(whole, parts, atol=logprob_tolerance())


def test_a_model_with_windows_scores_by_full_attention(folder: Callable[..., Path]) -> None:
    windows = load_text(
        folder("gemma3_text", sliding_window=256, sliding_window_pattern=2), LoadOptions()
    )
    model = DraftModel(windows, 384)
    assert model.longest_scored == windows.info.context_length
    found, _ = scored(model, [t % 250 for t in TEXT])
    assert found.max() > 0, "what layers that keep every token look at"


def test_tokens_unknown_to_the_scorer_still_get_finite_scores(folder: Callable[..., Path]) -> None:
    few = load_text(folder("qwen3", seed=2, vocab_size=352), LoadOptions())
    found, _ = scored(DraftModel(few, 384), [*TEXT[:300], 383, 400])
    assert np.isfinite(found).all()


def test_scoring_does_not_change_other_requests(small: TextModel, qwen3: TextModel) -> None:
    """Scored beside rows and by itself: the same tokens; the model's own attention is untouched."""
    scorer = DraftModel(small, 384)
    alone, company = (new_request(TEXT[:700], max_tokens=12) for _ in range(2))
    engine = thinning(qwen3, scorer, share=0.4)
    run(engine, alone)
    assert alone.selected is not None
    others = [new_request(TEXT[i : i + 30], max_tokens=40) for i in range(3)]
    engine = thinning(qwen3, scorer, share=0.4)
    for other in others:
        engine.submit(other)
        engine.step()
    run(engine, company)
    assert company.selected == alone.selected
    assert company.rows[0].tokens == alone.rows[0].tokens
    twins = [new_request(other.prompt.tokens, max_tokens=40) for other in others]
    engine = thinning(qwen3)
    run(engine, *twins)
    assert [t.rows[0].tokens for t in twins] == [o.rows[0].tokens for o in others]
