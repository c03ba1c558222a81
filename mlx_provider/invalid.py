"""Converts pydantic's errors to messages for the client, the same with LiteLLM and without."""

from collections.abc import Sized
from reprlib import Repr
from typing import Any

from pydantic import BaseModel, ValidationError

from .errors import BadRequest
from .protocol.requests import GenerateRequest, ModelRequest, Sampling

LOWER = {"ge": "at least", "gt": "above"}  # by pydantic's names of limits
UPPER = {"le": "at most", "lt": "below"}
_RANGES = ("greater_than", "less_than")
_UNITS = {"too_long": "entries", "string_too_long": "characters"}
_OWN = ("too_deep", "too_many", "no_unicode", "no_name", "reserved")  # only our validators'
_WITHOUT_VALUE = ("json_invalid", "missing", *_OWN)


def bad_request(
    error: ValidationError, kind: type[ModelRequest] = GenerateRequest, *, flat: bool = False
) -> BadRequest:
    """The error names the first wrong parameter, the valid range, and the value. `kind`: the class
    that was validated. `flat`: the client's sampling parameters are top-level fields."""
    found = error.errors(include_url=False)
    # if a value may have two types, our own error is more useful than one about a wrong type
    first = next((problem for problem in found if problem["type"] in _OWN), found[0])
    owner: type[BaseModel] = kind
    loc = [part for part in first["loc"] if _is_field(part)]
    if loc[:1] == ["sampling"] and len(loc) > 1:
        owner, loc = Sampling, loc[1:]
    names = loc if flat or owner is kind else ["sampling", *loc]
    where = ".".join(map(str, names))
    return BadRequest(f"{where or 'body'}: {_demand(owner, loc, first)}", param=where or None)


def _is_field(part: str | int) -> bool:
    """Whether a part of an error's location is a name or index, not the branch of a union."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))


def _demand(owner: type[BaseModel], loc: list[str | int], error: Any) -> str:
    kind, value = error["type"], error["input"]
    if kind in _UNITS:
        size = len(value) if isinstance(value, Sized) else "more"
        return f"at most {error['ctx']['max_length']} {_UNITS[kind]} are possible, got {size}"
    if kind in _WITHOUT_VALUE:
        return str(error["msg"])
    ranged = kind.startswith(_RANGES) and len(loc) == 1
    return f"{allowed_range(owner, str(loc[0])) if ranged else error['msg']}, got {quote(value)}"


def allowed_range(owner: type[BaseModel], name: str) -> str:
    """The range of a field of `owner`, such as `must be at least 0 and at most 1`."""
    field = owner.model_fields[name]
    bounds = [
        f"{word} {limit if isinstance(limit, int) else f'{limit:g}'}"
        for words in (LOWER, UPPER)
        for attribute, word in words.items()
        for piece in field.metadata
        if (limit := getattr(piece, attribute, None)) is not None
    ]
    return "must be " + " and ".join(bounds)


def quote(value: object, length: int = 80) -> str:
    """The beginning of a value's `repr`, without formatting a large value completely."""
    brief = Repr()
    brief.maxstring = brief.maxother = brief.maxlong = length
    text = brief.repr(value[:length] if isinstance(value, str) else value)
    return text if len(text) <= length else text[:length] + "…"
