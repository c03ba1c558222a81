"""Many models in one group, asked at once: each request gets what it gets from one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

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
    embed,
    followed,
    pictures,
    read,
)

pytestmark = pytest.mark.ranks
SEES = ("qwen3_vl", "qwen3_5", "gemma3")
NAMES = (*SEES, "qwen3_moe", "llama")
HELD = {"auto": NAMES, "merged": ("qwen3_vl", "qwen3_5"), "solo": ("qwen3_vl", "qwen3_5")}
"""Models of a play, by the layout of its rows."""
CASES = [
    *((2, layout, name) for layout, names in HELD.items() for name in names),
    *((4, "auto", name) for name in NAMES),
]
WORDS = "hello world how are you, and what of it " * 4
TURNS = [
    {"role": "user", "content": WORDS},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "and today"},
]
SPARED = (" penalised", " cut", " vectors")
JSON = {"type": "json_object"}
DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 4}
PENALISED = {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"65": 2.0}}
Over = Callable[[int], dict[str, tuple[Played, list[Held]]]]


def begun(name: str, model: Path) -> list[Step]:
    """Requests that come at once, one of which is left in the middle of others' prompts."""
    image = [ask(f"{name} seen", model, pictures((1, 2), "what is this"))] if name in SEES else []
    return [
        ask(f"{name} first", model, WORDS, max_tokens=20),
        ask(f"{name} left", model, "x " * 60, max_tokens=400),
        read(f"{name} left", 3),
        *image,
        ask(f"{name} drawn", model, "two", n=2, sampling=DRAWN),
        ask(f"{name} penalised", model, WORDS, sampling=PENALISED),
        cancel(f"{name} left"),
    ]


def joined(name: str, model: Path) -> list[Step]:
    """Requests that join, and go on from what others have left in the prefix cache."""
    again = [ask(f"{name} again", model, pictures((1, 2), "and that"), n=2)] if name in SEES else []
    return [
        read(f"{name} first"),
        ask(f"{name} prefix", model, "", messages=TURNS, logprobs=False),
        *again,
        ask(f"{name} json", model, "json", response_format=JSON, max_tokens=16),
        ask(f"{name} cut", model, WORDS, stop=["e", "a"], max_tokens=60),
        embed(f"{name} vectors", model, ["hello", "two words"], options={"pooling": "mean"}),
    ]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Play]:
    """By layout: all of its models at once."""
    folder = tmp_path_factory.mktemp("wide")
    models = {name: write(folder / name, name) for name in NAMES}
    return {layout: play(layout, {n: models[n] for n in names}) for layout, names in HELD.items()}


def play(layout: str, models: dict[str, Path]) -> Play:
    do = [step for part in (begun, joined) for each in models.items() for step in part(*each)]
    return {"settings": {"kv_layout": layout}, "do": do}


def shorter(play: Play) -> Play:
    """For ranks that share few cores."""
    return play | {"do": [step for step in play["do"] if not step["id"].endswith(SPARED)]}


@pytest.fixture(scope="module")
def whole(plays: dict[str, Play], tmp_path_factory: pytest.TempPathFactory) -> Played:
    return all_alone(tmp_path_factory.mktemp("alone"), [plays["auto"]])[0]


@pytest.fixture(scope="module")
def over(plays: dict[str, Play], tmp_path_factory: pytest.TempPathFactory) -> Over:
    @cache
    def run(ranks: int) -> dict[str, tuple[Played, list[Held]]]:
        chosen = plays if ranks == 2 else {"auto": shorter(plays["auto"])}
        played = all_over(ranks, tmp_path_factory.mktemp("over"), list(chosen.values()))
        return dict(zip(chosen, played, strict=True))

    return run


@pytest.mark.parametrize(("ranks", "layout", "name"), CASES)
def test_ranks_answer_as_one_process(
    ranks: int, layout: str, name: str, whole: Played, over: Over
) -> None:
    together = of_model(name, over(ranks)[layout][0])
    answers = together["answers"]
    alone = {key: of_model(name, whole)["answers"][key] for key in answers}
    agree({"answers": alone}, together, cancelled={f"{name} left"})
    failed = {key for key, each in answers.items() if "failed" in each}
    assert failed <= {"gemma3 vectors"}, "it shows no hidden states"
    assert set(answers[f"{name} drawn"]["texts"]) == {"0", "1"}
    assert answers[f"{name} prefix"]["usage"]["cached_tokens"] > 0
    if name in SEES:
        assert answers[f"{name} again"]["usage"]["cached_tokens"] > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_followers_hold_what_rank_0_holds(ranks: int, over: Over) -> None:
    for layout, (together, followers) in over(ranks).items():
        assert len(followers) == ranks - 1
        assert together["engines"] == len(HELD[layout])
        followed(together, followers)


def of_model(name: str, played: Played) -> Played:
    own = {key: each for key, each in played["answers"].items() if key.startswith(f"{name} ")}
    return {"answers": own}
