"""Images that were seen before, and text and images together.

Everything goes over HTTP, images as PNG data URLs. (repeat) time to first token of a prompt with
an image: first, repeated, with another question, in another conversation, and of the same prompt
without its image. (mixed) eight requests, half with an image each of its own size, together and
one after another. Answers are compared with those that our engine gives to each alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_provider.errors import EngineUnavailable, RequestFailed
from mlx_provider_bench.models.random_weights import IMAGE_EDGE, document, load, write_model
from mlx_provider_bench.report import Result, against, print_rows, size_of, surroundings
from mlx_provider_bench.servers.client import Answer, Client, Messages
from mlx_provider_bench.servers.processes import MLX_VLM, OURS, running
from mlx_provider_bench.servers.questions import HELLO, image_part, same

FAMILIES = ("qwen3_vl", "gemma3", "qwen3_5")
PARTS = ("repeat", "mixed")
REPEAT_TARGET = 1.3
MIXED_TARGET = 1.5
_RATE = "together_tokens_per_second"


@dataclass(frozen=True)
class Plan:
    """What is measured, and how large."""

    families: Sequence[str] = FAMILIES
    edge: int = IMAGE_EDGE
    """Pixels along the sides of the repeated image."""
    system_tokens: int = 200
    trials: int = 3
    requests: int = 8
    reply: int = 64
    """Tokens of each mixed reply."""
    hidden: int = 256
    layers: int = 6
    dtype: str = "float32"
    peers: bool = False
    parts: Sequence[str] = PARTS


@dataclass(frozen=True)
class Texts:
    """Texts of one family's measurement, drawn once."""

    systems: Sequence[str]
    questions: Sequence[str]


def bench(plan: Plan) -> Result:
    """Run the plan; JSON-able. Tables go to stderr."""
    result = surroundings(plan.dtype) | {"hidden": plan.hidden, "layers": plan.layers}
    result |= {"models": {}, "skipped": [], **{part: [] for part in plan.parts}}
    for family in plan.families:
        with tempfile.TemporaryDirectory() as scratch:
            folder = write_model(
                Path(scratch) / family, family, plan.dtype, plan.hidden, plan.layers
            )
            model = load(folder, plan.dtype)
            result["models"][family] = size_of(model)
            texts = Texts(
                [document(model, plan.system_tokens, seed) for seed in range(3 * plan.trials)],
                [document(model, 12 + 30 * (i % 3), 100 + i) for i in range(plan.requests)],
            )
            del model
            _family(result, plan, family, folder, texts)
    print_rows("time to first token with an image seen before", _REPEAT, result.get("repeat", []))
    print_rows("text and images together", _MIXED, result.get("mixed", []))
    return result


def _family(result: Result, plan: Plan, family: str, folder: Path, texts: Texts) -> None:
    """Every server in turn; ours first, since its solo answers are what others are held to."""
    truths: list[list[Answer]] = []
    for kind in (OURS, MLX_VLM) if plan.peers else (OURS,):
        head = {"server": kind.name, "family": family}
        try:
            with running(kind, folder, folder.parent / f"{kind.name}.log") as server:
                client = Client(server)
                _warm_up(client)
                for part in plan.parts:
                    result[part].append(head | _measured(part, client, plan, texts, truths))
                client.close()
        except EngineUnavailable as error:
            result["skipped"].append(head | {"why": error.message[:200]})
    if "mixed" in plan.parts:
        _beside_peer(result["mixed"], family)


def _measured(
    part: str, client: Client, plan: Plan, texts: Texts, truths: list[list[Answer]]
) -> Result:
    """One part of one server; a request that fails is a result too."""
    try:
        if part == "repeat":
            return _repeated(client, plan, texts)
        return _mixed(client, plan, texts, truths)
    except RequestFailed as error:
        return {"failed": error.message[:100]}


def _beside_peer(rows: Sequence[Result], family: str) -> None:
    """Our rate over the peer's, where the peer answered at all."""
    rates = {row["server"]: row.get(_RATE, 0.0) for row in rows if row["family"] == family}
    peer = rates.get(MLX_VLM.name)
    if peer:
        ours = next(row for row in rows if row["family"] == family and row["server"] == OURS.name)
        ours["over_peer"] = against(rates[OURS.name] / peer, MIXED_TARGET, at_least=True)


def _warm_up(client: Client) -> None:
    client.ask(HELLO, 4)
    client.ask(_message("Hello", "What is it?", image_part(999, 64, 64)), 4)


def _message(system: str, question: str, image: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    content: Any = question
    if image is not None:
        content = [dict(image), {"type": "text", "text": question}]
    return [{"role": "system", "content": system}, {"role": "user", "content": content}]


def _repeated(client: Client, plan: Plan, texts: Texts) -> Result:
    """The fastest of the trials, each with an image and a system prompt of its own."""
    seen: dict[str, list[float]] = {}
    right = 0

    def timed(name: str, messages: Messages) -> Answer:
        answer = client.first_token(messages)
        seen.setdefault(name, []).append(answer.total)
        return answer

    for trial in range(plan.trials):
        image = image_part(trial, plan.edge, plan.edge)
        here, there = texts.systems[3 * trial], texts.systems[3 * trial + 1]
        first = timed("first", _message(here, "Which colour?", image))
        again = timed("repeat", _message(here, "Which colour?", image))
        timed("other_question", _message(here, "What shape is it?", image))
        timed("elsewhere", _message(there, "Which colour?", image))
        timed("bare_first", _message(texts.systems[3 * trial + 2], "Which colour?", None))
        timed("bare_repeat", _message(texts.systems[3 * trial + 2], "Which colour?", None))
        right += same(again, first.text)
    best = {f"{name}_seconds": min(times) for name, times in seen.items()}
    strict = best["repeat_seconds"] / best["bare_repeat_seconds"]
    return best | {
        "repeat_over_bare_repeat": against(strict, REPEAT_TARGET, at_least=False),
        "repeat_over_bare_first": round(best["repeat_seconds"] / best["bare_first_seconds"], 3),
        "elsewhere_over_first": round(best["elsewhere_seconds"] / best["first_seconds"], 3),
        "first_over_repeat": round(best["first_seconds"] / best["repeat_seconds"], 2),
        "same_answers": f"{right}/{plan.trials}",
    }


def _mixed(client: Client, plan: Plan, texts: Texts, truths: list[list[Answer]]) -> Result:
    """The fastest of the trials, each with images of its own; answers of all of them count.

    Together first, while no image has been seen: what solo gains from that counts against us.
    truths: the true answers of each trial; filled here by the first server.
    """
    together_rates, solo_rates = [], []
    together, alone, right = [], [], []
    for trial in range(plan.trials):
        prompts = _mixed_prompts(plan, texts, trial)
        client.server.reset()
        began = time.perf_counter()
        at_once = client.ask_together(prompts, plan.reply)
        together_rates.append(_tokens(at_once) / (time.perf_counter() - began))
        client.server.reset()
        began = time.perf_counter()
        in_turn = [client.try_ask(messages, plan.reply) for messages in prompts]
        solo_rates.append(_tokens(in_turn) / (time.perf_counter() - began))
        if len(truths) == trial:
            truths.append(in_turn)
        together += at_once
        alone += in_turn
        right += truths[trial]
    row: Result = {
        _RATE: max(together_rates),
        "solo_tokens_per_second": max(solo_rates),
        "right_together": _count(together, right),
        "right_alone": _count(alone, right),
        "together_as_alone": _count(together, alone),
    }
    failures = [answer.failure for answer in (*together, *alone) if answer.failure]
    if failures:
        row["failed"] = f"{len(failures)} of {2 * len(together)}: {failures[0][:60]}"
    ratio = row[_RATE] / max(1e-9, row["solo_tokens_per_second"])
    row["together_over_solo"] = against(ratio, MIXED_TARGET, at_least=True)
    return row


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(answer.tokens for answer in answers)


def _mixed_prompts(plan: Plan, texts: Texts, trial: int) -> list[Messages]:
    sizes = [(96, 96), (128, 224), (224, 160), (320, 256)]
    prompts: list[Messages] = []
    for i, question in enumerate(texts.questions):
        height, width = sizes[i // 2 % len(sizes)]
        image = image_part(500 + 100 * trial + i, height, width) if i % 2 else None
        prompts.append(_message(f"You are assistant {i} of {trial}.", question, image))
    return prompts


def _count(answers: Sequence[Answer], right: Sequence[Answer]) -> str:
    equal = sum(same(answer, truth.text) for answer, truth in zip(answers, right, strict=True))
    return f"{equal}/{len(answers)}"


_REPEAT = {
    "server": "server",
    "family": "family",
    "first s": "first_seconds",
    "repeat s": "repeat_seconds",
    "other question s": "other_question_seconds",
    "elsewhere s": "elsewhere_seconds",
    "no image s": "bare_first_seconds",
    "no image again s": "bare_repeat_seconds",
    "repeat/no image again": "repeat_over_bare_repeat",
    "equal": "same_answers",
    "failed": "failed",
}
_MIXED = {
    "server": "server",
    "family": "family",
    "tokens/s together": _RATE,
    "alone": "solo_tokens_per_second",
    "together/alone": "together_over_solo",
    "over peer": "over_peer",
    "right together": "right_together",
    "right alone": "right_alone",
    "as alone": "together_as_alone",
    "failed": "failed",
}
