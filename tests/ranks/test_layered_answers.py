"""A model split layer by layer, whose ranks keep unlike parts of a row, behind the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.testing.tiny import build

from .models import LAYERED
from .rank_schedules import Played, Step, agree, alone, ask, cancel, embed, followed, over, read

pytestmark = pytest.mark.ranks
CASES = [
    pytest.param(("qwen2", 2), id="two layers and one"),
    pytest.param(("ministral3", 3), id="a window, all tokens, a window"),
    pytest.param(("qwen3_next", 3), id="a state and all tokens, all tokens, a state"),
    pytest.param(("bailing_hybrid", 3), id="three layers, two, two"),
]
WORDS = "hello world how are you"
LONG = "one sees many words in this, and none of them is of any use at all. " * 4
BUDGET = 160_000
"""Bytes for prefixes: fewer than those of the schedule."""


def turns(name: str, model: Path, *texts: str, **more: Any) -> Step:
    """The last of several messages of a user and an assistant."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return ask(name, model, "", messages=messages, **more)


def schedule(model: Path) -> list[Step]:
    bits = {"options": {"kv_bits": 8}}
    few = [ask("few bits", model, WORDS, **bits)] if "next" in model.name else []
    return [
        ask("first", model, WORDS),
        ask("left", model, "x " * 60, max_tokens=400),
        ask("beside", model, LONG),
        read("left", 5),
        cancel("left"),
        read("first"),
        read("beside"),
        turns("asked", model, LONG, "yes", "and what of it?"),
        read("asked"),
        turns("again", model, LONG, "yes", "and what of it?", "nothing", "then go on"),
        read("again"),
        *(ask(f"other {i}", model, f"{i} {LONG}", max_tokens=4) for i in range(6)),
        read("other 5"),
        turns("later", model, LONG, "yes", "and what of it?", "nothing", "once more"),
        ask("choices", model, "two", n=2, sampling={"temperature": 0.9, "seed": 4}),
        ask("json", model, "json", response_format={"type": "json_object"}, max_tokens=20),
        ask("stopped", model, WORDS, sampling={"temperature": 1.2, "top_p": 0.9, "seed": 1}),
        embed("vectors", model, ["hello", "two words"], options={"pooling": "mean"}),
        *few,
    ]


@dataclass(frozen=True)
class Both:
    one: Played
    together: Played
    followers: list[Any]


@pytest.fixture(scope="module", params=CASES)
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The same schedule in one process, and over ranks."""
    name, ranks = request.param
    _, family, overrides = LAYERED[name]
    model = build(tmp_path_factory.mktemp("layered") / name, family, **overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_PROVIDER_PREFIX_BYTES", str(BUDGET))
        patch.setenv("MLX_PROVIDER_MAX_CHUNK", "128")
        do = schedule(model)
        one = alone(tmp_path_factory.mktemp("alone"), do)
        return Both(one, *over(ranks, tmp_path_factory.mktemp("over"), do))


def test_layers_on_ranks_answer_as_one_process(both: Both) -> None:
    agree(both.one, both.together, cancelled={"left"})
    assert all("failed" not in got for got in both.together["answers"].values())
    cached = both.together["answers"]["again"]["usage"]["cached_tokens"]
    assert cached == both.one["answers"]["again"]["usage"]["cached_tokens"] > 0
    assert set(both.together["answers"]["choices"]["texts"]) == {"0", "1"}
    assert both.together["models"] == both.one["models"]


def test_ranks_keep_and_forget_the_same_prefixes(both: Both) -> None:
    own = both.together["cache"]
    assert own["evicted_bytes"] > 0
    assert own["entries"] > 0
    followed(both.together, both.followers)
