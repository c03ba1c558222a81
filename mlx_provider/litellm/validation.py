"""A validation error of the protocol, in the words of the client that caused it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import BadRequest
from ..protocol import GenerateRequest, Sampling

LOWER = {"ge": "at least", "gt": "above"}
UPPER = {"le": "at most", "lt": "below"}


def validated(fields: dict[str, Any]) -> GenerateRequest:
    """The request. Raises `BadRequest` that names the parameter, its range and the value."""
    try:
        return GenerateRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    loc = list(first["loc"])
    owner: type[BaseModel] = GenerateRequest
    if loc[0] == "sampling" and len(loc) > 1:
        owner, loc = Sampling, loc[1:]
    name = str(loc[0])
    demand = allowed_range(owner, name) if first["type"].startswith(_BOUNDS) else first["msg"]
    where = ".".join(map(str, loc))
    raise BadRequest(f"{where}: {demand}, got {_shown(first['input'])}", param=name)


_BOUNDS = ("greater_than", "less_than")


def allowed_range(owner: type[BaseModel], name: str) -> str:
    """The bounds of a field, both of them, for people: `at least 0 and at most 1`."""
    field = owner.model_fields[name]
    bounds = [
        f"{word} {limit:g}"
        for words in (LOWER, UPPER)
        for attribute, word in words.items()
        for piece in field.metadata
        if (limit := getattr(piece, attribute, None)) is not None
    ]
    return "must be " + " and ".join(bounds)


def _shown(value: object, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "…"
