"""`mlx-provider eval needle`: facts that a model finds, by length of the prompt and depth.

Lengths double up to the limit of the model's context, memory and the user's choice. The model's own
template and tokenizer count the tokens. Each cell has several requests through the gateway, each
for another fact, with greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlx_provider.errors import ContextTooLong

from .asking import Client, Reply
from .conditions import conditions, of_subject
from .haystack import HAYSTACKS, Haystack, as_long_as
from .stage import Staged

Result = dict[str, Any]
NEARLY = 1.1
"""A limit that is less than this times the length before it is no length of its own."""


@dataclass(frozen=True)
class Plan:
    haystack: str = ""
    """One of `HAYSTACKS`; empty: a talk for the models of the package, a document for others."""
    least: int = 1024
    """Tokens of the shortest prompt."""
    limit: int | None = None
    """Tokens of the longest prompt; `None`: the limit of model and memory."""
    depths: Sequence[int] = (0, 25, 50, 75, 100)
    """Percent of the prompt before the fact."""
    needles: int = 3
    """Requests per cell."""
    max_tokens: int = 64
    said: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limit:
    """Tokens of the longest prompt, and the reason for that limit."""

    tokens: int
    why: str


def limit_of(plan: Plan, staged: Staged) -> Limit:
    """The smallest limit of: model, memory, user."""
    context = staged.status.context_length
    bounds = [Limit(context - plan.max_tokens - 1, "the model's context")]
    bounds.append(Limit(_fitting(staged) - plan.max_tokens - 1, "this machine's memory"))
    if plan.limit is not None:
        bounds.append(Limit(plan.limit, "--limit"))
    return min(bounds, key=lambda bound: bound.tokens)


def _fitting(staged: Staged) -> int:
    from mlx_provider.commands import context_in_memory

    return context_in_memory(staged.subject.model, staged.status.context_length)


def lengths(least: int, limit: int) -> list[int]:
    """Lengths from `least` to `limit`; each is double the one before."""
    found = []
    length = least
    while length < limit:
        found.append(length)
        length *= 2
    if found and limit < NEARLY * found[-1]:
        found.pop()
    return [*found, limit]


def asks(plan: Plan, staged: Staged) -> int:
    """Number of requests for one subject."""
    return len(_lengths(plan, limit_of(plan, staged))) * len(plan.depths) * plan.needles


def _lengths(plan: Plan, limit: Limit) -> list[int]:
    return lengths(min(plan.least, limit.tokens), limit.tokens)


def measured(plan: Plan, staged: Staged, done: Callable[[], None]) -> Result:
    """One subject's result; JSON-able. `done` is called after each question.

    Raises `EngineUnavailable` if the gateway has ended.
    """
    limit = limit_of(plan, staged)
    if limit.tokens < 1:
        why = f"{limit.why} leaves no room for a prompt beside --max-tokens {plan.max_tokens}"
        return {**of_subject(staged), "skipped": why}
    haystack = _haystack(plan, staged)
    client = Client(staged, plan.max_tokens, plan.said)
    try:
        cells = list(_cells(plan, staged, haystack, client, _lengths(plan, limit), done))
    finally:
        client.close()
    return {
        **of_subject(staged),
        "haystack": haystack.name,
        "limit": limit.tokens,
        "limited_by": limit.why,
        "cells": cells,
    }


def _haystack(plan: Plan, staged: Staged) -> Haystack:
    from mlx_provider.commands import DEMOS

    return HAYSTACKS[plan.haystack or ("talk" if staged.subject.model in DEMOS else "document")]


def _cells(
    plan: Plan,
    staged: Staged,
    haystack: Haystack,
    client: Client,
    wanted: Sequence[int],
    done: Callable[[], None],
) -> Iterator[Result]:
    def count(messages: Any) -> int:
        try:
            return staged.engine.count(staged.request(messages, template=_template(plan)))
        except ContextTooLong as error:
            return error.tokens or staged.status.context_length

    near = 8
    for length in wanted:
        for depth in plan.depths:
            asked = []
            for seed in range(plan.needles):
                build = partial(_built, haystack, depth / 100, seed, length)
                messages, tokens, near = as_long_as(build, count, length, near)
                asked.append((tokens, haystack.answer(seed), client.ask(messages, stream=True)))
                done()
            yield _cell(length, depth, asked)


def _built(haystack: Haystack, depth: float, seed: int, length: int, parts: int) -> Any:
    return haystack.build(parts, depth, seed, length)


def _template(plan: Plan) -> dict[str, Any]:
    """Variables of the chat template, which can affect the length of a prompt."""
    return dict(plan.said.get("chat_template_kwargs") or {})


def _cell(length: int, depth: int, asked: Sequence[tuple[int, str, Reply]]) -> Result:
    replies = [reply for _, _, reply in asked]
    found = sum(answer in reply.text for _, answer, reply in asked)
    missed = [
        {"wanted": answer, **reply.encoded()}
        for _, answer, reply in asked
        if answer not in reply.text
    ]
    return {
        "length": length,
        "depth": depth,
        "tokens": max(tokens for tokens, _, _ in asked),
        "skipped": max(reply.skipped for reply in replies),
        "asked": len(asked),
        "found": found,
        "failed": sum(bool(reply.failure) for reply in replies),
        "missed": missed,
    }


def whole(plan: Plan, subjects: Sequence[Result]) -> Result:
    return {
        "eval": "needle",
        **conditions(),
        "depths": list(plan.depths),
        "needles": plan.needles,
        "max_tokens": plan.max_tokens,
        "said": dict(plan.said),
        "subjects": list(subjects),
    }
