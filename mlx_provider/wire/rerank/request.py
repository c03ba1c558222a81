"""Parameters of a rerank or a score to the engine's request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ...errors import BadRequest
from ...invalid import bad_request, shown
from ...protocol.requests import ScoreRequest
from ..openai.parameters import Parameters


def score_request(
    params: Parameters, sender: Mapping[str, Any], queries: Any, documents: Any
) -> ScoreRequest:
    """The request for the engine. Raises `BadRequest` that names the parameter at fault."""
    params.take("user")  # nothing is kept for anybody
    fields: dict[str, Any] = {
        **sender,
        "queries": queries,
        "documents": documents,
        "instruction": params.take("instruction"),
        "ignored": params.ignored(),
    }
    params.refuse_rest()
    try:
        return ScoreRequest.model_validate(fields)
    except ValidationError as error:
        raise bad_request(error, ScoreRequest) from None


def texts(given: Any, name: str) -> list[Any]:
    """A text, or a list of texts or of objects with a `text`, as texts. Raises `BadRequest` that
    names the item."""
    items = [given] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise BadRequest(
            f"{name} must be a text or a list of texts, got {shown(given)}", param=name
        )
    found = [each.get("text") if isinstance(each, Mapping) else each for each in items]
    for index, each in enumerate(found):
        if not isinstance(each, str):
            at = f"{name}[{index}]"
            raise BadRequest(f"{at} must be a text, or an object with a text", param=at)
    return found


def top_n(params: Parameters) -> int | None:
    """How many documents are wanted. `None`: all."""
    value = params.take("top_n")
    if value is not None and (type(value) is not int or value < 1):
        raise BadRequest(f"top_n must be a whole number above 0, got {shown(value)}", param="top_n")
    return value
