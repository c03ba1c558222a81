"""What memory and an operator's options cause over two ranks: the answers stay those of one."""

from __future__ import annotations

import shutil
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
    cancelled_in,
    followed,
    likelihoods_agree,
    pictures,
    read,
)

pytestmark = pytest.mark.ranks
STEP = 0.02
BY_A_MODEL = ("by a model", "by a model, again")
LONG = "hello world how are you, and what of it " * 4
TIGHT = {"output_reserve": 16, "max_chunk": 32}
KV = {"kv_bits": 8}


def rows_outgrow_the_memory(models: dict[str, Path]) -> Play:
    """Each begins with little room, and asks for more as it goes on."""
    do = [ask(f"{i}", models["llama"], f"{i} " * (9 + i), max_tokens=300) for i in range(4)]
    return {"settings": TIGHT | {"memory_limit": 1_800_000, "prefix_bytes": 100_000}, "do": do}


def rows_with_images_outgrow_it(
    models: dict[str, Path], name: str = "qwen3_vl", limit: int = 2_100_000
) -> Play:
    """What starts again has neither its prefix nor its image's features.

    `limit`: bytes that hold one whole row and the largest measured pass, and not three rows. A row
    that could never be whole would end before its 300 tokens.
    """
    do = [
        ask(f"{i}", models[name], pictures((i,), f"{i} " * (9 + i)), max_tokens=300)
        for i in range(3)
    ]
    none = {"prefix_bytes": 0, "feature_bytes": 0}
    return {"settings": TIGHT | none | {"memory_limit": limit}, "do": do}


def rows_with_states_outgrow_it(models: dict[str, Path]) -> Play:
    return rows_with_images_outgrow_it(models, "qwen3_5", limit=2_500_000)


def prefixes_are_evicted(models: dict[str, Path]) -> Play:
    do: list[Step] = []
    for i in range(8):
        for name in ("llama", "qwen3_5", "gemma3"):
            key = f"{name} {i}"
            do += [ask(key, models[name], f"{i % 4} {LONG}"), *([read(key)] if i % 2 else [])]
    return {"settings": {"prefix_bytes": 500_000}, "do": do}


def quantised_kv(models: dict[str, Path]) -> Play:
    model, more = models["wide heads"], {"options": KV, "max_tokens": 30}
    do = [
        ask("plain", model, LONG),
        ask("first", model, LONG, **more),
        ask("left", model, "x " * 50, options=KV, max_tokens=300),
        read("left", 3),
        ask("joined", model, "hello", n=2, **more),
        read("first"),
        cancel("left"),
        ask("prefix", model, f"{LONG} today", **more),
    ]
    return {"do": do}


def long_prompts_beside_rows(models: dict[str, Path]) -> Play:
    do: list[Step] = []
    for name in ("llama", "qwen3_vl", "qwen3_5"):
        do += [
            ask(f"{name} row", models[name], "hello", max_tokens=60),
            read(f"{name} row", 2),
            ask(f"{name} long", models[name], f"{name} {LONG * 6}"),
            ask(f"{name} longer", models[name], f"other {LONG * 9}", n=2),
        ]
    image = pictures((1, 2), LONG * 3)
    do += [ask("with images", models["qwen3_vl"], image, n=3)]
    return {"settings": {"max_chunk": 64, "stall_target": 0.01}, "do": do}


def drafts(models: dict[str, Path]) -> Play:
    """Text that repeats itself."""
    model, biased = models["llama"], {"temperature": 0, "logit_bias": {"65": 100.0}}
    same = {"drafter": "model", "draft_model": str(models["draft"])}
    do = [
        ask("lookup", model, "A" * 40, sampling=biased, max_tokens=120),
        ask("beside", model, LONG, max_tokens=40),
        ask("sampled", model, LONG, max_tokens=40, sampling={"temperature": 1.0, "seed": 3}),
        read("lookup"),
        ask(BY_A_MODEL[0], model, LONG, options=same, max_tokens=60),
        ask(BY_A_MODEL[1], model, "hello", options=same, max_tokens=60, n=2),
        ask("off", model, LONG, options={"drafter": "off"}, max_tokens=40),
    ]
    return {"do": do}


def models_that_come_and_go(models: dict[str, Path]) -> Play:
    do: list[Step] = []
    brief = {"options": {"keep_alive": 0.2}}
    for turn in range(2):
        for name in ("llama", "qwen3_vl"):
            key = f"{name} {turn}"
            do += [ask(key, models[name], LONG, **brief), read(key)]
            do += [{"do": "gone", "id": str(models[name])}]
    return {"do": do}


def models_that_make_way(models: dict[str, Path]) -> Play:
    """There is room for one at a time."""
    do = [
        ask(f"{name} {turn}", models[name], LONG)
        for turn in range(2)
        for name in ("llama", "qwen3_5", "qwen3_vl")
    ]
    return {"settings": {"memory_limit": 2_000_000, "max_chunk": 32}, "do": do}


def echoed_prompts(models: dict[str, Path]) -> Play:
    do: list[Step] = []
    for name in ("llama", "qwen3_5"):
        do += [
            ask(f"{name} row", models[name], "hello", max_tokens=40),
            ask(f"{name} echo", models[name], "", messages=None, prompt=LONG, echo=True, n=2),
            ask(f"{name} echo again", models[name], "", messages=None, prompt=LONG, echo=True),
        ]
    return {"settings": {"max_chunk": 32}, "do": do}


PLAYS = {
    make.__name__.replace("_", " "): make
    for make in (
        rows_outgrow_the_memory,
        rows_with_images_outgrow_it,
        rows_with_states_outgrow_it,
        prefixes_are_evicted,
        quantised_kv,
        long_prompts_beside_rows,
        drafts,
        models_that_come_and_go,
        models_that_make_way,
        echoed_prompts,
    )
}
Over = dict[str, tuple[Played, list[Held]]]


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Play]:
    folder = tmp_path_factory.mktemp("memory")
    models = {n: write(folder / n, n) for n in ("llama", "qwen3_vl", "qwen3_5", "gemma3")}
    models["wide heads"] = write(folder / "wide", "llama", head_dim=32)
    models["draft"] = Path(shutil.copytree(models["llama"], folder / "draft"))
    return {name: make(models) for name, make in PLAYS.items()}


@pytest.fixture(scope="module")
def over(plays: dict[str, Play], tmp_path_factory: pytest.TempPathFactory) -> Over:
    played = all_over(2, tmp_path_factory.mktemp("over"), list(plays.values()))
    return dict(zip(plays, played, strict=True))


@pytest.fixture(scope="module")
def whole(plays: dict[str, Play], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    played = all_alone(tmp_path_factory.mktemp("alone"), [ample(each) for each in plays.values()])
    return dict(zip(plays, played, strict=True))


def ample(play: Play) -> Play:
    """The same with all the memory there is."""
    return play | {"settings": {}}


@pytest.mark.parametrize("name", PLAYS)
def test_two_ranks_answer_as_one_process(
    name: str, plays: dict[str, Play], over: Over, whole: dict[str, Played]
) -> None:
    together, followers = over[name]
    left = cancelled_in(plays[name])
    if name == "quantised kv":  # one rounding may move a value by a step of eight bits
        likelihoods_agree(whole[name], together, STEP)
    else:
        agree(whole[name], together, cancelled=left)
    followed(together, followers)


def test_what_these_are_about_has_happened(over: Over) -> None:
    happened = {name: played["happened"] for name, (played, _) in over.items()}
    answers = {name: played["answers"] for name, (played, _) in over.items()}
    print(happened)
    for name in PLAYS:
        assert happened[name].get("preempted", 0) > 0 or "outgrow" not in name, name
    evicting = over["prefixes are evicted"][0]["cache"]
    assert min(evicting["evicted_bytes"], evicting["reused_tokens"]) > 0
    assert over["quantised kv"][0]["engines"] == 2
    assert answers["quantised kv"]["prefix"]["usage"]["cached_tokens"] > 0
    beside = happened["long prompts beside rows"]
    assert min(beside["mixed"], beside["apart"]) > 0
    drafted = {name: each["usage"] for name, each in answers["drafts"].items()}
    assert drafted["lookup"]["accepted_tokens"] > 0
    assert sum(drafted[each]["accepted_tokens"] for each in BY_A_MODEL) > 0
    assert drafted["off"]["drafted_tokens"] == 0
    assert happened["models that come and go"]["unloaded"] == 4
    assert happened["models that make way"]["unloaded"] >= 5
    echo = answers["echoed prompts"]["llama echo"]
    assert {len(each) for each in echo["logprobs"].values()} == {
        echo["usage"]["prompt_tokens"] + 12
    }
