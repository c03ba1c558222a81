"""Shape of what `bench grammar` reports, its vocabulary, and its judgement of replies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from grammar_masks import _compiler, _constraints, _follows
from mlx_provider.commands import load_model
from tiny import build
from vocabulary import widen


def test_rows(benchmark_here: Callable[..., dict[str, Any]]) -> None:
    few = ("--vocabulary", "8000", "--rows", "4", "--constrained", "2", "--steps", "4")
    result = benchmark_here("grammar", *few, "--repeats", "1", "--hidden", "64", "--layers", "2")
    assert [(row["constrained"], row["masks"]) for row in result["rows"]] == [
        (0, "pooled"),
        (2, "pooled"),
        (2, "serial"),
    ]
    assert [row["valid"] for row in result["rows"]] == ["0/0", "2/2", "2/2"]
    assert [row["free_rows_unchanged"] for row in result["rows"]] == ["4/4", "2/2", "2/2"]
    assert all(row["as_pooled"] for row in result["rows"])


def test_vocabulary_and_forbidden_tokens(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen3", vocab_size=6000)
    before = Tokenizer.from_file(str(folder / "tokenizer.json"))
    widen(folder, 6000)
    after = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert after.get_vocab_size() == 6000
    assert len(set(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])) == 6000
    for special in ("<|im_end|>", "<|endoftext|>"):
        assert after.token_to_id(special) == before.token_to_id(special)
    text = 'some words, {"a": 1}'
    assert after.decode(after.encode(text).ids) == text

    compiler = _compiler(load_model(folder, "float32"), None)
    regex = lambda: _constraints(compiler, 2)[1]  # noqa: E731
    words, capitals = (after.encode(text).ids for text in ("many words ", "MANY WORDS "))
    assert _follows(regex(), words)
    assert not _follows(regex(), capitals)
    assert not _follows(regex(), [])
