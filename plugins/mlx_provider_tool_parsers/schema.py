"""Names and types from a request's tools, and conversion of values to them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mlx_provider.records import Tools, listed_parameters, listed_values, type_of, value_types

Unknown = Literal["string", "json"]
"""A value of unknown type: `string` is text, unless it is a JSON object or list; `json` is any
JSON, if it parses."""


def functions(tools: Tools) -> dict[str, Mapping[str, Any]]:
    found = (tool.get("function", tool) for tool in tools)
    return {x["name"]: x for x in found if isinstance(x, Mapping) and "name" in x}


def accepts(tools: Tools) -> Callable[[str], bool]:
    """Without tools, every name is valid."""
    names = frozenset(functions(tools))
    return lambda name: not names or name in names


def properties(tools: Tools, name: str) -> Mapping[str, Any]:
    return listed_parameters(functions(tools).get(name, {}).get("parameters"))[0]


def types(tools: Tools, name: str, key: str) -> frozenset[str]:
    """JSON types of a parameter; empty: unknown."""
    return value_types(*_parameter(tools, name, key))


def listed(tools: Tools, name: str, key: str) -> list[Any]:
    """Values of an `enum` or similar list; empty: none."""
    return listed_values(*_parameter(tools, name, key)) or []


def _parameter(tools: Tools, name: str, key: str) -> tuple[Any, Mapping[str, Any]]:
    root = functions(tools).get(name, {}).get("parameters")
    return properties(tools, name).get(key), root if isinstance(root, Mapping) else {}


def is_text(wanted: frozenset[str], unknown: Unknown) -> bool:
    return wanted == {"string"} if wanted else unknown == "string"


def as_json(
    text: str, wanted: frozenset[str], unknown: Unknown, members: Sequence[Any] = ()
) -> str:
    """Bare text as JSON of a type that its schema allows. `members`: the values that the schema
    lists. A value of no allowed type stays a string, so that the client's validation reports it."""
    if not wanted and unknown == "string":
        return _container(text) or json.dumps(text, ensure_ascii=False)
    converted = _converted(text, wanted)
    if members and json.loads(converted) not in members and text.strip() in members:
        return json.dumps(text.strip(), ensure_ascii=False)
    return converted


def _converted(text: str, wanted: frozenset[str]) -> str:
    if wanted == {"string"}:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    if bare.lower() in ("null", "none") and ("null" in wanted or "string" not in wanted):
        return "null"
    if "string" in wanted and not wanted & _structured:
        return json.dumps(text, ensure_ascii=False)
    if bare in ("True", "False") and ("boolean" in wanted or not wanted):
        return bare.lower()
    if "boolean" in wanted and bare.lower() in ("true", "false"):
        return bare.lower()
    if wanted & {"integer", "number"} and _WHOLE.fullmatch(bare):
        return str(int(bare))
    literal = _literal(bare)
    if literal is None or not _fits(literal, wanted):
        return json.dumps(text, ensure_ascii=False)
    return literal


_WHOLE = re.compile(r"[-+]?\d{1,300}")
_structured = frozenset({"object", "array", "integer", "number", "boolean"})


def _container(text: str) -> str:
    bare = text.strip()
    if bare[:1] not in ("{", "["):
        return ""
    try:
        json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ""
    return bare


def _literal(text: str) -> str | None:
    """JSON text of a JSON or Python literal; `None`: not a literal."""
    try:
        json.loads(text, parse_constant=_refuse)
    except RecursionError:
        return None
    except ValueError:
        pass
    else:
        return text
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _fits(literal: str, wanted: frozenset[str]) -> bool:
    if not wanted:
        return True
    found = type_of(json.loads(literal))
    if found == "integer" and "number" in wanted:
        return True
    if found == "number" and "integer" in wanted:
        return float(literal).is_integer()
    return found in wanted
