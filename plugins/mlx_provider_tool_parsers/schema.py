"""What a request's tools say about names and types, and values brought to their type."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from mlx_provider.records import Tools

Unknown = Literal["string", "json"]
"""What a value is whose type no schema tells: text as it stands, or JSON where it is JSON."""


def functions(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Function objects by name."""
    found = (tool.get("function", tool) for tool in tools)
    return {x["name"]: x for x in found if isinstance(x, Mapping) and "name" in x}


def accepts(tools: Tools) -> Callable[[str], bool]:
    """Whether a name is one of the tools; with no tools given every name is."""
    names = frozenset(functions(tools))
    return lambda name: not names or name in names


def properties(tools: Tools, name: str) -> Mapping[str, Any]:
    """Property schemas of one tool's parameters."""
    parameters = functions(tools).get(name, {}).get("parameters")
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def types(tools: Tools, name: str, key: str) -> frozenset[str]:
    """JSON types that a parameter may have; empty: its schema does not tell."""
    schema = properties(tools, name).get(key)
    root = functions(tools).get(name, {}).get("parameters")
    return frozenset(_types(schema, root if isinstance(root, Mapping) else {}, 0))


def schema_types(schema: Any) -> frozenset[str]:
    """JSON types that a schema allows, as far as it tells without references."""
    return frozenset(_types(schema, {}, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    found: set[str] = set()
    declared = schema.get("type")
    if isinstance(declared, str):
        found.add(_json_type(declared))
    elif isinstance(declared, list):
        found.update(_json_type(x) for x in declared if isinstance(x, str))
    if found:
        return found
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, depth + 1) or {"object"}
    for word in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(word) or ():
            found |= _types(branch, root, depth + 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return found | {_type_of(value) for value in values}


_PREFIXES = {
    "str": "string",
    "text": "string",
    "char": "string",
    "varchar": "string",
    "enum": "string",
    "int": "integer",
    "uint": "integer",
    "long": "integer",
    "short": "integer",
    "unsigned": "integer",
    "num": "number",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "map": "object",
    "arr": "array",
    "list": "array",
    "tuple": "array",
}


def _json_type(name: str) -> str:
    """The JSON type that tools written for other languages mean by `float32`, `List[str]` ..."""
    lower = name.strip().lower()
    return next((json_type for p, json_type in _PREFIXES.items() if lower.startswith(p)), lower)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "object" if isinstance(value, Mapping) else "array"


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found


def is_text(wanted: frozenset[str], unknown: Unknown) -> bool:
    """Whether a value is text whatever it looks like, and may be shown while it is written."""
    return wanted == {"string"} if wanted else unknown == "string"


def as_json(text: str, wanted: frozenset[str], unknown: Unknown) -> str:
    """A value written as bare text, as JSON of a type that its schema allows.

    A value that fits no allowed type stays a string: the client's validation can then name it.
    """
    if is_text(wanted, unknown):
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


def _literal(text: str) -> str | None:
    """JSON text of a JSON or Python literal; None: it is neither."""
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
    found = _type_of(json.loads(literal))
    if found == "integer" and "number" in wanted:
        return True
    if found == "number" and "integer" in wanted:
        return float(literal).is_integer()
    return found in wanted
