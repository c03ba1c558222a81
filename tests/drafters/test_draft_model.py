"""A smaller model by itself: who may guess for whom, what it reads, and what it takes back."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_provider import BadRequest, LoadOptions
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import DraftOptions, DraftRow
from mlx_provider.testing.driver import alone, new_request, output_of
from mlx_provider_drafters import mlx_drafters
from mlx_provider_drafters.draft_model import PIECE, DraftModel
from quantised import quantise

Folders = Callable[..., Path]
TEXT = [(31 * i) % 300 + 20 for i in range(600)]
MODEL, LOOKUP = list(mlx_drafters())[:2]


def refusal(folder: Path, model: TextModel, draft: Path | None) -> str:
    return MODEL.refuses(folder, model, DraftOptions(draft))


def plain(model: TextModel, tokens: Sequence[int], count: int) -> list[int]:
    """What the model says by itself, greedily."""
    request = new_request(list(tokens), max_tokens=count)
    return output_of(alone(model, request)).tokens


def ready(drafting: DraftModel, row: DraftRow) -> list[int]:
    for _ in range(40):
        (found,) = drafting.propose([row])
        if found is not None:
            return list(found)
    raise AssertionError("never ready")


def guesses(drafting: DraftModel, rows: Sequence[DraftRow]) -> list[list[int]]:
    return [list(own or ()) for own in drafting.propose(rows)]


# -- who may


def test_a_draft_model_named_by_the_operator_precedes_prompt_lookup(
    folder: Folders, qwen3: TextModel
) -> None:
    own, none = folder("qwen3"), DraftOptions()
    assert "draft_model" in MODEL.refuses(own, qwen3, none)
    assert MODEL.refuses(own, qwen3, DraftOptions(folder("qwen3", seed=1))) == ""
    assert MODEL.automatic > LOOKUP.automatic > 0
    assert LOOKUP.refuses(own, qwen3, none) == ""
    with pytest.raises(BadRequest, match="draft_model"):
        MODEL.start(own, qwen3, none)


def test_a_draft_model_and_its_rows_stay_within_their_memory(
    folder: Folders, qwen3: TextModel
) -> None:
    draft = folder("qwen3", seed=1)
    weights = sum(path.stat().st_size for path in draft.glob("*.safetensors"))
    told = MODEL.refuses(draft, qwen3, DraftOptions(draft, room=weights - 1))
    assert f"{weights} bytes" in told
    assert f"room for {weights - 1}" in told
    drafting = MODEL.start(draft, qwen3, DraftOptions(draft, room=2**26))
    least = MODEL.start(draft, qwen3, DraftOptions(draft, room=weights))
    assert MODEL.keeps(least) < MODEL.keeps(drafting) <= 2**26 // 4


def test_a_draft_model_with_another_vocabulary_is_refused(
    folder: Folders, qwen3: TextModel
) -> None:
    told = refusal(folder("qwen3"), qwen3, folder("llama"))
    assert "of 342 tokens the two models have 0 in common, 99% are needed" in told


def test_a_draft_model_with_a_few_more_tokens_is_accepted(
    folder: Folders, qwen3: TextModel, tmp_path: Path
) -> None:
    def with_vocabulary(name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        content = json.loads((folder("qwen3") / "tokenizer.json").read_text())
        change(content)
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(content))
        config = (folder("qwen3") / "config.json").read_text()
        (tmp_path / name / "config.json").write_text(config)
        return tmp_path / name

    def add(content: dict[str, Any]) -> None:
        content["added_tokens"].append({"id": 350, "content": "<new>"})

    def move(content: dict[str, Any]) -> None:
        content["model"]["vocab"] = {t: i + 1 for t, i in content["model"]["vocab"].items()}

    def as_unigram(content: dict[str, Any]) -> None:
        ordered = sorted(content["model"]["vocab"].items(), key=lambda each: each[1])
        content["model"]["vocab"] = [[token, -1.0] for token, _ in ordered]

    def none(content: dict[str, Any]) -> None:
        content["model"] = {}

    told = {
        change.__name__: refusal(folder("qwen3"), qwen3, with_vocabulary(change.__name__, change))
        for change in (add, move, as_unigram, none)
    }
    assert told["add"] == told["as_unigram"] == ""
    assert "in common" in told["move"]
    assert "names no tokens" in told["none"]


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "nobodys"}'])
def test_a_draft_model_that_cannot_be_read_is_refused_in_one_line(
    folder: Folders, qwen3: TextModel, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    told = refusal(folder("qwen3"), qwen3, tmp_path)
    assert str(tmp_path) in told
    assert "\n" not in told


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "gemma3_text"])
def test_a_draft_model_whose_cache_cannot_be_trimmed_is_refused(
    folder: Folders, qwen3: TextModel, family: str
) -> None:
    """Recurrent states, and a window of 24 tokens."""
    with pytest.raises(BadRequest, match="cannot be taken back"):
        MODEL.start(folder("qwen3"), qwen3, DraftOptions(folder(family)))


@pytest.mark.parametrize(("room", "quantised"), [(None, False), (2**18, True)])
def test_on_a_cpu_quantised_draft_weights_are_expanded_if_they_fit(
    folder: Folders,
    qwen3: TextModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int | None,
    quantised: bool,
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(folder("qwen3"), draft)
    quantise(draft, "qwen3")
    drafting = MODEL.start(draft, qwen3, DraftOptions(draft, room=room))
    products, product = [], nn.QuantizedLinear.__call__
    counted = lambda layer, x: (products.append(layer), product(layer, x))[1]  # noqa: E731
    monkeypatch.setattr(nn.QuantizedLinear, "__call__", counted)
    assert ready(drafting, DraftRow(TEXT[:20], wanted=3))
    assert bool(products) is quantised


# -- what it guesses


@pytest.fixture
def drafting(qwen3: TextModel) -> DraftModel:
    return DraftModel(qwen3, qwen3.info.vocab_size)


def test_a_model_drafts_its_own_reply_exactly(drafting: DraftModel, qwen3: TextModel) -> None:
    said = plain(qwen3, TEXT[:30], 30)
    row = DraftRow(TEXT[:30])
    for at, row.wanted in [(1, 5), (6, 7), (8, 3), (12, 7), (20, 1), (21, 4)]:
        row.tokens[30:] = said[:at]
        assert ready(drafting, row) == said[at : at + row.wanted]


def test_rejected_drafts_do_not_change_later_drafts(drafting: DraftModel, qwen3: TextModel) -> None:
    row = DraftRow(TEXT[:50], wanted=7)
    for more in ([300], [20, 21], [], [40], list(range(100, 140))):
        row.tokens += more
        assert ready(drafting, row) == plain(qwen3, row.tokens, 7)


def test_rows_drafted_together_get_drafts_of_each(drafting: DraftModel, qwen3: TextModel) -> None:
    rows = [DraftRow(TEXT[: 3 + 40 * i], wanted=1 + (3 * i) % 7) for i in range(6)]
    for step in range(2):
        for row in rows:
            ready(drafting, row)
            row.tokens += TEXT[step : step + 1 + len(row.tokens) % 8]
        found = guesses(drafting, rows)
        assert found == [plain(qwen3, row.tokens, row.wanted) for row in rows]


def test_rows_of_a_solo_layout_are_drafted_one_by_one(qwen3: TextModel) -> None:
    drafting = DraftModel(replace(qwen3, kv_layouts=("solo",)), qwen3.info.vocab_size)
    rows = [DraftRow(TEXT[:n], wanted=n) for n in (4, 2, 7)]
    assert guesses(drafting, rows) == [plain_steps(qwen3, row) for row in rows]


def plain_steps(model: TextModel, row: DraftRow) -> list[int]:
    cache, tokens = model.make_cache(), list(row.tokens)
    logits = model.model(mx.array(tokens)[None], cache=cache)
    for _ in range(row.wanted):
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
        logits = model.model(mx.array(tokens[-1:])[None], cache=cache)
    return tokens[len(row.tokens) :]


def test_no_draft_is_outside_the_vocabulary_of_the_target(folder: Folders) -> None:
    """Nor is one read that the smaller one does not know."""
    small = load_text(folder("qwen3", seed=2, vocab_size=352), LoadOptions())
    unknown = DraftRow([383, 1000, 5], wanted=7)
    assert max(ready(DraftModel(small, 30), unknown)) < 30
    assert ready(DraftModel(small, 384), DraftRow([383, 5], wanted=1)) == plain(small, [351, 5], 1)


# -- how much it reads


def test_rows_share_the_tokens_that_one_call_may_prefill(
    drafting: DraftModel, qwen3: TextModel
) -> None:
    long, short = DraftRow(TEXT[:580], wanted=1), DraftRow(TEXT[:30], wanted=1)
    rows = [long, short]
    assert drafting.propose(rows) == [None, None]
    assert long.state.known == PIECE
    assert short.state.known == 0
    assert drafting.propose(rows) == [None, None]
    assert guesses(drafting, rows) == [plain(qwen3, row.tokens, 1) for row in rows]


def test_a_long_row_is_drafted_from_its_last_tokens(folder: Folders, qwen3: TextModel) -> None:
    drafting = DraftModel(qwen3, qwen3.info.vocab_size, context=128)
    row = DraftRow(TEXT[:500], wanted=3)
    assert ready(drafting, row) == plain(qwen3, row.tokens[-64:], 3)
    begin = 500 - 64
    for step in range(12):
        row.tokens += [*ready(drafting, row)[:2], *range(step, step + 6)]
        assert row.state.cache[0].offset <= 128
    assert row.state.begin > begin
    assert ready(drafting, row) == plain(qwen3, row.tokens[row.state.begin :], 3)


def test_a_draft_window_restarts_before_it_wraps(folder: Folders, qwen3: TextModel) -> None:
    small = folder("gemma3_text", sliding_window=256)
    model = load_text(small, LoadOptions())
    drafting = DraftModel(model, model.info.vocab_size)
    row = DraftRow([token % 250 for token in TEXT[:240]], wanted=7)
    for _ in range(20):
        row.tokens += [*ready(drafting, row)[:2], 33]
    assert len(row.tokens) > 256
    assert ready(drafting, row) == plain(model, row.tokens[row.state.begin :], 7)


def test_rows_beyond_the_draft_memory_get_drafts_once_another_row_ends(qwen3: TextModel) -> None:
    each = 2 * 2 * 2 * 16 * 4 * 512  # layers, keys and values, heads, dim, bytes; tokens
    drafting = DraftModel(qwen3, 384, context=512, kv_bytes=2 * each)
    rows = [DraftRow(TEXT[: 9 + i], wanted=1) for i in range(3)]
    first, second, third = drafting.propose(rows)
    assert first
    assert second
    assert third == ()
    del rows[0]
    assert all(drafting.propose(rows))
