"""Shape of what `bench prefix` reports, and that it notices wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.commands import load_model
from mlx_provider_bench.prefix_cache import Subject, _first_tokens, document
from random_weights import write_model


@pytest.mark.sweep
def test_every_part(bench: Callable[..., dict[str, Any]]) -> None:
    parts = ("--part", "ttft", "--part", "conversation")
    sizes = ("--tokens", "200", "--document", "120", "--turns", "2")
    result = bench("prefix", *parts, "--model", "demo+image", *sizes)
    (row,) = result["ttft"]
    assert row["same_tokens"] == "14/14"
    assert row["repeat_cached"] == row["prompt_tokens"] - 1
    for hit in (row["next_turn"], row["other_question"]):
        assert 0 < hit["computed"] < 100 < hit["cached"]
    (talk,) = result["conversation"]
    assert talk["same_tokens"] == "2/2"
    assert talk["cached_tokens"][0] < talk["cached_tokens"][1]
    assert result["models"]["demo"]["weights_bytes"] > 0


def test_a_checkpoint_in_place_of_the_demo_models(
    bench: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "mine", "llama", "float32", 64, 2)
    parts = ("--part", "ttft", "--part", "conversation", "--tokens", "100", "--document", "60")
    result = bench("prefix", "--model", str(folder), *parts, "--turns", "2")
    (row,), (talk,) = result["ttft"], result["conversation"]
    assert row["model"] == talk["model"] == "mine"
    assert row["repeat_cached"] == row["prompt_tokens"] - 1
    for hit in (row["next_turn"], row["other_question"]):
        assert 0 < hit["computed"] < hit["cached"]
    assert talk["cached_tokens"][0] < talk["cached_tokens"][1]
    assert (row["same_tokens"], talk["same_tokens"]) == ("14/14", "2/2")
    assert list(result["models"]) == ["mine"]


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    folder = write_model(tmp_path / "model", "llama", "float32", 64, 2)
    return Subject(load_model(folder, "float32"), image=False)


def test_a_wrong_reuse_shows(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    store = subject.store
    acquire = store.acquire

    def spoilt(match: Any, *given: Any, **more: Any) -> Any:
        cache, lease = acquire(match, *given, **more)
        if match.length > 100:
            for layer in cache:
                layer.values = layer.values[..., ::-1]
        return cache, lease

    monkeypatch.setattr(store, "acquire", spoilt)
    row = _first_tokens(subject, 200)
    assert row["same_tokens"] != "14/14"


def test_documents_differ_by_seed_alone(subject: Subject) -> None:
    first, again, other = (document(subject.model, 100, seed) for seed in (1, 1, 2))
    assert first == again != other
    for tokens in (100, 16_384):
        text = document(subject.model, tokens, 3)
        assert abs(len(subject.model.tokenizer.encode(text, special=False)) - tokens) < 5
