"""Rows of a model over ranks share their common prefix on each rank, and answer as one process."""

from __future__ import annotations

from collections.abc import Callable
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
    followed,
    likelihoods_agree,
    pictures,
    read,
)

pytestmark = pytest.mark.ranks
LEAST = 16
STEP = 0.02
COMMON = "one sees many words in this, and none of them is of any use at all. " * 4
SETTINGS = {"max_chunk": 64, "output_reserve": 16, "measurements": "off"}
FULL = {"max_rows": 3}
"""Fewer rows than one account asks for."""
TIGHT = {"memory_limit": 9_000_000}
"""Room for the trial at load, without which rows decode alone, but not for `OUTGROWING` rows."""
OUTGROWING = 22
BRANCHES, TURNS = 0, 1
"""The plays with many rows at a time, and in which a row takes over the buffers of the last."""
PRESSED = {3: 1, 4: OUTGROWING}
"""Those in which rows free their memory for others, and how many rows begin behind a prefix there
at least: all except the first, and those that begin again."""
COUNTS = ("behind a prefix", "in place", "shared tokens")
CASES = {
    "heads, text": (2, "llama", False),
    "heads, window": (2, "gemma3", False),
    "heads, states": (2, "qwen3_5", False),
    "heads, image": (2, "qwen3_vl", False),
    "heads, 8 bits": (2, "llama", False),
    "layers, text": (2, "qwen2", True),
    "layers, states": (2, "qwen3_next", True),
    "layers, a rank of windows": (2, "ministral3", True),
    "layers, a rank of states": (3, "qwen3_next", True),
}
Ask = Callable[..., Step]


def asking(model: Path, *, seeing: bool, bits: int | None) -> Ask:
    """A request that begins as all others do."""

    def branch(name: str, ending: str, **more: Any) -> Step:
        more |= {"options": {"kv_bits": bits}} if bits else {}
        content = pictures((1,), COMMON + ending) if seeing else COMMON + ending
        return ask(name, model, content, max_tokens=more.pop("max_tokens", 24), **more)

    return branch


def branches(branch: Ask) -> list[Step]:
    """Rows join behind a prefix in use, leave it, are cancelled, and fork."""
    do = [branch("first", "a", max_tokens=60), read("first", 3)]
    for i in range(5):
        do += [branch(f"{i}", f"{i} " * (1 + 3 * i)), read(f"{i}", 2)]
    return [
        *do,
        cancel("1"),
        branch("several", "say it", n=3),
        branch("sampled", "go on", sampling={"temperature": 1.0, "seed": 3}),
        read("3"),
        cancel("first"),
        branch("late", "and now?"),
        read("several"),
        read("late"),
        branch("last", "0 "),
    ]


def turns(branch: Ask) -> list[Step]:
    """A conversation that continues, alone."""
    said = [COMMON, "yes", "and what of it?", "nothing", "then go on", "so be it", "why?"]
    do: list[Step] = []
    for count in (1, 3, 5, 7):
        roles = ["user", "assistant"] * 4
        messages = [{"role": r, "content": t} for r, t in zip(roles, said[:count], strict=False)]
        name = f"turn {count}"
        do += [branch(name, "", messages=messages, max_tokens=12), read(name)]
    return do


def plays_of(model: Path, case: str) -> list[Play]:
    branch = asking(model, seeing="image" in case, bits=8 if "bits" in case else None)
    flood = [branch(f"{i}", f"{i} " * (1 + 9 * i), max_tokens=90, account="a") for i in range(5)]
    other = [read("2", 2), branch("other", "and me?", account="b"), read("other")]
    begun = [branch("first", "a", max_tokens=300), read("first", 3)]
    outgrow = [branch(f"{i}", f"{i} " * (1 + i), max_tokens=300) for i in range(OUTGROWING - 1)]
    pressed = [
        {"settings": SETTINGS | FULL, "least": LEAST, "do": [*flood, *other]},
        {"settings": SETTINGS | TIGHT, "least": LEAST, "do": [*begun, *outgrow]},
    ]
    return [
        {"settings": SETTINGS, "least": LEAST, "do": branches(branch)},
        {"settings": SETTINGS, "least": LEAST, "do": turns(branch)},
        {"settings": SETTINGS | {"prefix_bytes": 200_000}, "least": LEAST, "do": branches(branch)},
        *(pressed if case == "heads, text" else []),
    ]


@pytest.fixture(scope="module", params=CASES)
def both(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The plays in one process, and over ranks."""
    ranks, name, layered = CASES[request.param]
    sizes = {"head_dim": 32} if "bits" in request.param else {}
    model = write(tmp_path_factory.mktemp("shared") / name, name, layered=layered, **sizes)
    plays = plays_of(model, request.param)
    ample = [play | {"settings": SETTINGS} for play in plays]
    whole = all_alone(tmp_path_factory.mktemp("alone"), ample)
    return plays, whole, all_over(ranks, tmp_path_factory.mktemp("over"), plays)


Both = tuple[list[Play], list[Played], list[tuple[Played, list[Held]]]]


def test_ranks_that_share_prefixes_answer_as_one_process(both: Both) -> None:
    for play, one, (together, followers) in zip(*both, strict=True):
        if "options" in play["do"][0]["request"]:  # a rounding may move a value by a step
            likelihoods_agree(one, together, STEP)
        else:
            agree(one, together, cancelled=cancelled_in(play))
        assert all("failed" not in got for got in together["answers"].values())
        followed(together, followers)


def test_each_rank_shares_as_much_as_rank_0(both: Both) -> None:
    for at, (together, followers) in enumerate(both[2]):
        for each in followers:
            for name in COUNTS:
                assert each["happened"].get(name, 0) == together["happened"].get(name, 0), name
        for each in (together, *followers):
            if at == TURNS:
                assert each["happened"]["in place"] >= 3
            elif at == BRANCHES:
                assert each["happened"]["behind a prefix"] >= 3
                assert each["happened"]["shared tokens"] > 3 * LEAST
            elif at in PRESSED:
                assert together["happened"]["preempted"] > 0
                assert each["happened"]["behind a prefix"] >= PRESSED[at]
