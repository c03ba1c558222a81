"""In 16 bits and below a request gets over ranks, in any company, what it gets over them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .models import write
from .rank_schedules import (
    Held,
    Played,
    Step,
    agree,
    all_alone,
    all_over,
    ask,
    cancel,
    followed,
    likelihoods_agree,
    pictures,
    read,
)

pytestmark = pytest.mark.ranks
SEES = ("qwen3_vl", "qwen3_5", "gemma3")
CASES = [
    *((name, form) for form in ("bfloat16", "4 bit, bfloat16") for name in (*SEES, "llama")),
    ("qwen3_moe", "4 bit"),
]
"""Experts in 16 bits have no kernel on a CPU (mlx 0.32.4, `GatherMM`)."""
WIDER = ("gemma3", "4 bit, bfloat16")
"""Where kernels round otherwise in company, in one process as over ranks."""
APART = {"bfloat16": 0.2, "4 bit, bfloat16": 0.5, "4 bit": 1e-3}
"""By which log-probabilities lie apart where sums are rounded in another order."""
NATIVE = {"dtype": "native"}
LONG = "hello world how are you, and what of it " * 4
TURNS = [
    {"role": "user", "content": LONG},
    {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "and today"},
]
Groups = tuple[tuple[Played, list[Held]], tuple[Played, list[Held]]]


def asked(name: str, case: str, model: Path) -> list[Step]:
    """What is compared."""
    image = [ask(f"{case} seen", model, pictures((1, 2), "what is"), options=NATIVE)]
    return [
        ask(f"{case} short", model, "hello", options=NATIVE, max_tokens=20),
        ask(f"{case} turns", model, "", messages=TURNS, options=NATIVE),
        *(image if name in SEES else []),
    ]


def one_by_one(name: str, case: str, model: Path) -> list[Step]:
    each = [[step, read(step["id"]), {"do": "clear"}] for step in asked(name, case, model)]
    return [step for steps in each for step in steps]


def in_company(name: str, case: str, model: Path) -> list[Step]:
    """The same among requests that come and go, one of which has left their prefix."""
    short, turns, *seen = asked(name, case, model)
    return [
        ask(f"{case} before", model, LONG, options=NATIVE, logprobs=False),
        read(f"{case} before"),
        ask(f"{case} beside", model, "x " * 30, options=NATIVE, max_tokens=60),
        ask(f"{case} left", model, "y " * 30, options=NATIVE, max_tokens=400),
        read(f"{case} left", 2),
        short,
        turns,
        read(f"{case} beside", 6),
        cancel(f"{case} left"),
        *seen,
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("forms")
    return {(name, form): write(folder / f"{name}-{form[:5]}", name, form) for name, form in CASES}


@pytest.fixture(scope="module")
def plays(models: dict[tuple[str, str], Path]) -> list[dict[str, Any]]:
    """Alone with whole prompts, in company with prompts in small chunks."""
    cases = [(name, f"{name} {form}", model) for (name, form), model in models.items()]
    alone = [step for case in cases for step in one_by_one(*case)]
    company = [step for case in cases for step in in_company(*case)]
    return [{"do": alone}, {"settings": {"max_chunk": 32}, "do": company}]


@pytest.fixture(scope="module")
def over(plays: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return all_over(2, tmp_path_factory.mktemp("over"), plays)


@pytest.fixture(scope="module")
def whole(plays: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Played:
    return all_alone(tmp_path_factory.mktemp("alone"), plays[:1])[0]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_request_gets_in_company_what_it_gets_alone(name: str, form: str, over: Groups) -> None:
    alone, company = (compared(name, form, played) for played, _ in over)
    if (name, form) == WIDER:
        likelihoods_agree(alone, company, APART[form])
    else:
        agree(alone, company)


@pytest.mark.parametrize(("name", "form"), CASES)
def test_one_process_finds_the_same_likely(
    name: str, form: str, over: Groups, whole: Played
) -> None:
    for played, _ in over:
        likelihoods_agree(compared(name, form, whole), compared(name, form, played), APART[form])


def test_followers_hold_what_rank_0_holds(over: Groups) -> None:
    for together, followers in over:
        followed(together, followers)


def compared(name: str, form: str, played: Played) -> Played:
    names = [step["id"] for step in asked(name, f"{name} {form}", Path())]
    return {"answers": {each: played["answers"][each] for each in names}}
