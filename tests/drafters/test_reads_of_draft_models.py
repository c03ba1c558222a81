"""What the host reads between two passes with drafts of a smaller model, and what that guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from device_reads import check_no_reads, drafted_rows
from host_gap import SAMPLING
from mlx_provider import LoadOptions
from mlx_provider.engine.speculation.speculation import Source
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import DeviceTokens, DraftRow, Unread
from mlx_provider.testing.driver import alone, new_request, output_of
from mlx_provider_drafters.draft_model import DraftModel

WRONG = 33


@pytest.fixture
def drafting(qwen3: TextModel) -> DraftModel:
    return DraftModel(qwen3, qwen3.info.vocab_size)


@pytest.fixture
def windows(folder: Callable[..., Path]) -> TextModel:
    """A model with windows as long as a draft model must have."""
    return load_text(folder("gemma3_text", sliding_window=256), LoadOptions())


def spoken(model: TextModel, tokens: list[int], count: int) -> list[int]:
    """The tokens, and what the model says behind them by itself, greedily."""
    return tokens + output_of(alone(model, new_request(tokens, max_tokens=count))).tokens


def unread(tokens: Sequence[int], held: int) -> Unread:
    return Unread(mx.array(tokens, mx.int32), mx.array([held], mx.int32))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_a_pass_with_drafts_is_launched_before_the_last_one_is_read(
    qwen3: TextModel, folder: Callable[..., Path], rows: int, sampling: str
) -> None:
    small = load_text(folder("qwen3", seed=4, num_hidden_layers=2), LoadOptions())
    drafting = DraftModel(small, qwen3.info.vocab_size)
    engine = drafted_rows(qwen3, Source(drafting), rows, SAMPLING[sampling])
    check_no_reads(engine, rows)


def test_a_pass_is_launched_so_with_windows_too(windows: TextModel, qwen3: TextModel) -> None:
    """Of the draft model, and of the model."""
    for model, small in ((qwen3, windows), (windows, qwen3)):
        drafting = DraftModel(small, model.info.vocab_size)
        check_no_reads(drafted_rows(model, Source(drafting), 2, SAMPLING["greedy"]), 2)


@pytest.mark.parametrize("name", [pytest.param("qwen3", marks=pytest.mark.sweep), "windows"])
def test_guesses_behind_unread_tokens_are_those_behind_read_ones(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Whether none, some or all drafts have held, with rows that have read tokens only."""
    model: TextModel = request.getfixturevalue(name)
    drafting = DraftModel(model, model.info.vocab_size)
    assert drafting.drafts_ahead
    rows = [DraftRow(list(range(40 + n, 46 + n)), wanted=1 + n) for n in range(5)]
    texts = [spoken(model, row.tokens, 70) for row in rows]
    drafting.propose(rows)
    for step in range(12):
        for n, row in enumerate(rows):
            size, row.wanted = 1 + (step + 2 * n) % 5, 1 + (step + 2 * n) % 7
            held = (step * n + n) % size
            drawn = texts[n][len(row.tokens) :][: held + 1]
            row.unread = unread([*drawn, *[WRONG] * 4][:size], held)
            if (step + n) % 4 == 3:
                row.tokens, row.unread = row.tokens + drawn, None
        found = [list(own or ()) for own in drafting.propose(rows)]
        for row, text, own in zip(rows, texts, found, strict=True):
            if row.unread is not None:
                row.unread.read = row.unread.held.item()
                row.tokens = text[: len(row.tokens) + row.unread.read + 1]
            assert own == text[len(row.tokens) :][: row.wanted]


def test_a_row_that_starts_again_follows_unread_tokens(qwen3: TextModel) -> None:
    drafting = DraftModel(qwen3, qwen3.info.vocab_size, context=64)
    row = DraftRow(list(range(40, 46)), wanted=4)
    text = spoken(qwen3, row.tokens, 130)
    drafting.propose([row])
    while len(row.tokens) < 120:
        row.unread = unread([*text[len(row.tokens) :][:3], WRONG], 2)
        (found,) = drafting.propose([row])
        row.tokens = text[: len(row.tokens) + 3]
        row.unread.read = 2
        assert row.state.cache[0].offset <= 64
    begin = row.state.begin
    assert begin > 0
    assert found is not None
    said = spoken(qwen3, row.tokens[begin:], 4)
    assert list(found) == said[-4:]


def test_guesses_are_not_read_to_follow_unread_tokens(
    drafting: DraftModel, qwen3: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = DraftRow(list(range(40, 46)), wanted=4)
    drafting.propose([row])
    row.unread = unread([WRONG, WRONG], 1)
    read: list[int] = []
    monkeypatch.setattr(DeviceTokens, "__getitem__", lambda own, at: read.append(at))
    assert drafting.propose([row])[0] is not None
    assert not read
