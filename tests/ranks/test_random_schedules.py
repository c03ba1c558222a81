"""Whatever clients do in whatever order: two ranks answer as one process does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from .models import write
from .rank_schedules import (
    Held,
    Play,
    Played,
    Step,
    agree,
    all_alone,
    all_over,
    ask,
    cancel,
    cancelled_in,
    embed,
    followed,
    pictures,
    read,
)

pytestmark = pytest.mark.ranks
SEEDS = range(8)
STEPS = 24
NAMES = ("llama", "qwen3_vl", "qwen3_5", "gemma3")
SEES = ("qwen3_vl", "qwen3_5", "gemma3")
EMBEDS = ("llama", "qwen3_5")
BEGINNINGS = ("hello world", "what is this " * 12, "how are you and what of it " * 20)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 5},
    {"temperature": 1.2, "min_p": 0.05, "seed": 7, "logit_bias": {"30": 2.0, "31": -100.0}},
)
MORE: tuple[dict[str, Any], ...] = (
    {},
    {"response_format": {"type": "json_object"}},
    {"grammar": {"type": "regex", "value": "[a-c]{3,40}"}},
    {"stop": ["e", "\n"]},
    {"min_tokens": 4},
    {"echo": True},
    {"drafts": False},
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_chunk": 32},
    {"max_chunk": 16, "kv_layout": "solo"},
    {"kv_layout": "merged"},
    {"prefix_bytes": 150_000},
    {"max_rows": 3, "feature_bytes": 3000},
)


class Clients:
    """Do what they like."""

    def __init__(self, seed: int, models: dict[str, Path]) -> None:
        self._random = random.Random(seed)
        self._models = models
        self._asked: list[str] = []
        self._left: set[str] = set()

    def steps(self, count: int) -> list[Step]:
        does = [self._ask] * 6 + [self._embed, self._read, self._read, self._cancel, self._clear]
        return [step for _ in range(count) for step in self._random.choice(does)()]

    def _named(self, model: str) -> str:
        self._asked.append(f"{len(self._asked)} {model}")
        return self._asked[-1]

    def _ask(self) -> list[Step]:
        pick = self._random.choice
        model = pick(list(self._models))
        text = pick(BEGINNINGS) + pick(("", "a", "and " * 9))
        images = pick([(), (), (1,), (2, 1), (3, 3)]) if model in SEES else ()
        chosen = {
            "max_tokens": pick((1, 2, 9, 30)),
            "n": pick((1, 1, 1, 3)),
            "sampling": pick(SAMPLINGS),
            "logprobs": pick((True, True, False)),
            **pick(MORE),
        }
        content = pictures(images, text) if images else text
        return [ask(self._named(model), self._models[model], content, **chosen)]

    def _embed(self) -> list[Step]:
        model = self._random.choice(EMBEDS)
        given = [self._random.choice(BEGINNINGS) for _ in range(self._random.randint(1, 3))]
        pooling = self._random.choice(("last", "mean", "cls"))
        return [embed(self._named(model), self._models[model], given, options={"pooling": pooling})]

    def _read(self) -> list[Step]:
        """A few tokens of a request, or all."""
        if not self._asked:
            return []
        return [read(self._random.choice(self._asked), self._random.choice((1, 2, 5, 1000)))]

    def _cancel(self) -> list[Step]:
        if not self._asked:
            return []
        return [cancel(self._random.choice(self._asked[-4:]))]

    def _clear(self) -> list[Step]:
        return [{"do": "clear"}]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> list[Play]:
    folder = tmp_path_factory.mktemp("random")
    models = {name: write(folder / name, name) for name in NAMES}
    return [
        {"settings": SETTINGS[seed % len(SETTINGS)], "do": Clients(seed, models).steps(STEPS)}
        for seed in SEEDS
    ]


@pytest.fixture(scope="module")
def over(plays: list[Play], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return all_over(2, tmp_path_factory.mktemp("over"), plays)


@pytest.fixture(scope="module")
def whole(plays: list[Play], tmp_path_factory: pytest.TempPathFactory) -> list[Played]:
    return all_alone(tmp_path_factory.mktemp("alone"), plays)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_ranks_answer_as_one_process(
    seed: int, plays: list[Play], over: list[tuple[Played, list[Held]]], whole: list[Played]
) -> None:
    together, followers = over[seed]
    left = cancelled_in(plays[seed])
    agree(whole[seed], together, cancelled=left)
    followed(together, followers)
