"""Scores in the forms of both routes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...protocol.events import Accepted, Done
from ..openai.answer import usage_of


def reranked(
    accepted: Accepted,
    found: Sequence[Any],
    done: Done,
    *,
    wanted: int | None,
    documents: Sequence[str] | None,
) -> dict[str, Any]:
    """The best documents, the best first. `documents`: their texts, if they are to be repeated."""
    best = sorted(found, key=lambda each: -each.score)[:wanted]
    results = [{"index": each.index, "relevance_score": each.score} for each in best]
    if documents is not None:
        results = [each | {"document": {"text": documents[each["index"]]}} for each in results]
    return {
        "id": f"rerank-{accepted.id}",
        "object": "list",
        "model": accepted.model,
        "results": results,
        "usage": _usage(done),
    }


def scored(accepted: Accepted, found: Sequence[Any], done: Done) -> dict[str, Any]:
    """A score for each document, in their order."""
    return {
        "id": f"score-{accepted.id}",
        "object": "list",
        "created": int(time.time()),
        "model": accepted.model,
        "data": [{"index": e.index, "object": "score", "score": e.score} for e in found],
        "usage": _usage(done),
    }


def _usage(done: Done) -> dict[str, Any]:
    usage = usage_of(done)
    return {
        "prompt_tokens": usage["prompt_tokens"],
        "total_tokens": usage["total_tokens"],
        "prompt_tokens_details": usage["prompt_tokens_details"],
    }
