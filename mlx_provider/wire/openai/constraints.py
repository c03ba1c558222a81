"""What the answer must look like: `response_format`, or one of the grammar extensions."""

from __future__ import annotations

import json
import re
from typing import Any

from ...errors import BadRequest
from ...invalid import shown
from .parameters import Parameters

EXTENSIONS = ("grammar", "guided_regex", "guided_grammar", "guided_choice", "guided_json")


def constraint(params: Parameters) -> dict[str, Any]:
    """`response_format` and `grammar`, of which at most one is set. Raises `BadRequest` if two
    constraints contradict or one is malformed."""
    given = {name: params.take(name) for name in ("response_format", *EXTENSIONS)}
    given = {name: value for name, value in given.items() if value is not None}
    if _is_text(given.get("response_format")):
        del given["response_format"]
    if len(given) > 1:
        raise BadRequest(f"only one of {', '.join(given)} can be given", param=min(given))
    for name, value in given.items():
        return _field(name, value)
    return {}


def _is_text(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _field(name: str, value: Any) -> dict[str, Any]:
    if name == "response_format":
        return {"response_format": _object(name, value)}
    if name == "guided_json":
        body = {"name": "guided_json", "schema": _object(name, _parsed(value))}
        return {"response_format": {"type": "json_schema", "json_schema": body}}
    if name == "guided_choice":
        return {"grammar": {"type": "regex", "value": _alternatives(value)}}
    if name == "grammar" and isinstance(value, dict):
        return {"grammar": _grammar(value)}
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a text, got {shown(value)}", param=name)
    return {"grammar": {"type": "regex" if name == "guided_regex" else "lark", "value": value}}


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"guided_json is not JSON: {error}", param="guided_json") from None


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{name} must be an object, got {shown(value)}", param=name)
    return value


def _alternatives(value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise BadRequest("guided_choice must be a list of texts", param="guided_choice")
    return "|".join(f"({re.escape(choice)})" for choice in value)


def _grammar(value: dict[str, Any]) -> dict[str, Any]:
    known = value.get("type") in ("regex", "lark") and isinstance(value.get("value"), str)
    if not known or len(value) != 2:
        raise BadRequest(
            'grammar must be a Lark text or {"type": "regex" | "lark", "value": text}',
            param="grammar",
        )
    return value
