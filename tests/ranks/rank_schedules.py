"""Schedules for `schedule_rank.py`, and what their answers have in common."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mlx_provider.testing.tiny.media import tiny_pixels
from rank_group import environment, launch

SCHEDULE = Path(__file__).with_name("schedule_rank.py")
Played = dict[str, Any]
"""What one play has come to on rank 0, see `schedule_rank.play`,"""
Held = dict[str, Any]
"""and what a follower holds of it in the end."""
Step = dict[str, Any]
Play = dict[str, Any]
"""`{"settings": {...}, "do": [...]}`: fields of `EngineSettings`, and steps of one service."""
EXACT = 1e-3
"""Of a log-probability in float32, whose sums have another order over ranks."""
LIKELY = 3


def alone(folder: Path, do: list[Step]) -> Played:
    """What a schedule comes to in one process. `folder`: empty."""
    return all_alone(folder, [{"do": do}])[0]


def over(ranks: int, folder: Path, do: list[Step], **more: Any) -> tuple[Played, list[Held]]:
    """What it comes to over ranks, and what the followers hold in the end. `folder`: empty.

    `elsewhere`: by rank, folders that models have there. Raises `RuntimeError`, see `launch`.
    """
    return all_over(ranks, folder, [{"do": do}], **more)[0]


def all_alone(folder: Path, plays: list[Play]) -> list[Played]:
    """The same of many plays, one after the other in one process."""
    command = [sys.executable, str(SCHEDULE), _written(folder, plays)]
    environ = environment(folder)
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    played: list[Played] = json.loads((folder / "0.json").read_text())
    return played


def all_over(
    ranks: int, folder: Path, plays: list[Play], **more: Any
) -> list[tuple[Played, list[Held]]]:
    """The same of many plays, one after the other over one group of ranks."""
    leader, *followers = launch(SCHEDULE, ranks, folder, _written(folder, plays, **more))
    return [(one, list(held)) for one, *held in zip(leader, *followers, strict=True)]


def _written(folder: Path, plays: list[Play], **more: Any) -> str:
    file = folder / "schedule.json"
    file.write_text(json.dumps({"plays": plays, **more}))
    return str(file)


def ask(name: str, model: Path, content: str | list[Any], **more: Any) -> Step:
    """A greedy request; `model_info`: what its operator has chosen."""
    body = {
        "model": str(model),
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "sampling": {"temperature": 0},
        "logprobs": True,
    }
    body |= more
    if body["logprobs"]:
        body["top_logprobs"] = LIKELY
    return {"do": "ask", "id": name, "request": body}


def embed(name: str, model: Path, given: list[str], **more: Any) -> Step:
    return {"do": "ask", "id": name, "request": {"model": str(model), "input": given} | more}


def score(name: str, model: Path, query: str, documents: list[str]) -> Step:
    given = {"queries": [query], "documents": documents}
    return {"do": "ask", "id": name, "request": {"model": str(model)} | given}


def read(name: str, tokens: int | None = None) -> Step:
    return {"do": "read", "id": name} | ({} if tokens is None else {"tokens": tokens})


def cancel(name: str) -> Step:
    return {"do": "cancel", "id": name}


def cancelled_in(play: Play) -> set[str]:
    """The requests that a play cancels."""
    return {step["id"] for step in play["do"] if step["do"] == "cancel"}


def pictures(seeds: Iterable[int], text: str) -> list[dict[str, Any]]:
    """A message with images."""
    urls = [{"type": "image_url", "image_url": {"url": _picture(seed)}} for seed in seeds]
    return [*urls, {"type": "text", "text": text}]


def _picture(seed: int) -> str:
    data = BytesIO()
    Image.fromarray(tiny_pixels(seed)).save(data, "PNG")
    return "data:image/png;base64," + b64encode(data.getvalue()).decode()


def agree(
    alone: Played,
    together: Played,
    *,
    within: float = EXACT,
    cancelled: frozenset[str] | set[str] = frozenset(),
) -> None:
    """Every request has got the same; of those that were cancelled, as far as both went."""
    assert alone["answers"].keys() == together["answers"].keys()
    for name, one in alone["answers"].items():
        other = together["answers"][name]
        for at in one["texts"].keys() & other["texts"].keys():
            _alike(one["logprobs"].get(at, []), other["logprobs"].get(at, []), within, name)
        if name in cancelled:
            _begins_alike(one["texts"], other["texts"], name)
            continue
        for what in ("texts", "thoughts", "finish", "failed"):
            assert one.get(what) == other.get(what), name
        _same_usage(one.get("usage"), other.get("usage"), name)
        _same_vectors(one.get("vectors", []), other.get("vectors", []), within)


def likelihoods_agree(alone: Played, together: Played, within: float) -> None:
    """Up to the first other token, whose choice rounding makes; at least one token of each."""
    for name, one in alone["answers"].items():
        for at, own in one["logprobs"].items():
            others = together["answers"][name]["logprobs"][at]
            same = _same_tokens(own, others)
            _alike(own[: same + 1], others[: same + 1], within, name)


def _same_tokens(one: list[Any], other: list[Any]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), min(len(one), len(other)))


def _alike(one: list[Any], other: list[Any], within: float, name: str) -> None:
    for (token, own, likely), (also, theirs, also_likely) in zip(one, other, strict=False):
        if token == also:
            assert (own is None and theirs is None) or abs(own - theirs) < within, name
        known = dict(map(tuple, likely))
        for each, value in also_likely:
            assert each not in known or abs(known[each] - value) < within, name


def _begins_alike(one: dict[str, str], other: dict[str, str], name: str) -> None:
    for at in one.keys() & other.keys():
        shorter, longer = sorted((one[at], other[at]), key=len)
        assert longer.startswith(shorter), name


def _same_usage(one: Any, other: Any, name: str) -> None:
    if one is None or other is None:
        assert one is other, name
        return
    for what in ("prompt_tokens", "completion_tokens", "reasoning_tokens"):
        assert one[what] == other[what], name


def _same_vectors(one: list[str], other: list[str], within: float) -> None:
    assert len(one) == len(other)
    for own, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(_vector(own), _vector(theirs), atol=within)


def _vector(told: str) -> Any:
    return np.frombuffer(b64decode(told), "<f4")


def followed(together: Played, followers: list[Held]) -> None:
    """Nothing of a request stays with a follower, and what is cached is what rank 0 has cached."""
    for each in followers:
        assert (each["requests"], each["rows"]) == (0, 0)
        assert each["engines"] == together["engines"]
        assert each["cache"] == together["cache"]
