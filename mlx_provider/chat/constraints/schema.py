"""Converts JSON schemas for the grammar engine. Unsupported keywords are refused by name. The lists
follow llguidance 1.9.1 (parser/src/json/schema.rs and docs/json_schema.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest
from .one_terminal import names_of_pattern

_OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_OF_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_OF_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_PLAIN = frozenset(
    "const enum type required minItems maxItems minProperties maxProperties minLength maxLength "
    "pattern minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()
)
_REFUSED = frozenset(
    "not if contains uniqueItems propertyNames dependentRequired dependentSchemas dependencies "
    "unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef".split()
)
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())
_REFUSED_FORMATS = frozenset(
    "regex iri iri-reference uri-reference uri-template idn-email idn-hostname json-pointer "
    "relative-json-pointer".split()
)
_COUNTED = "list the names in 'properties' and 'required', or demand one less"
_MAX_WARNINGS = 20


@dataclass
class SchemaReader:
    """`lenient`: unsupported keywords are reported and left out, not refused."""

    where: str
    lenient: bool = False
    root: str = "#"
    """JSON pointer of the schema in the compiled document."""
    warnings: list[str] = field(default_factory=list)

    def read(self, schema: Any) -> Any:
        """Annotations are left out and references moved to `root`. Raises `BadRequest` that names
        the keyword and its place."""
        return self._read(schema, "#")

    def _read(self, schema: Any, at: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._error(f"{at} must be a schema: an object or a boolean")
        out: dict[str, Any] = {}
        # Refused keywords come last, because their replacement changes the result of the others.
        for key, value in sorted(schema.items(), key=lambda entry: entry[0] in _REFUSED):
            if key in _OF_NAMES:
                out[key] = self._named(value, f"{at}/{key}")
            elif key in _OF_LIST or (key == "items" and isinstance(value, list)):
                out[key] = self._listed(value, f"{at}/{key}")
            elif key in _OF_ONE:
                out[key] = self._read(value, f"{at}/{key}")
            elif key in _PLAIN:
                out[key] = value
            elif key == "$ref":
                self._reference(out, value, at)
            elif key == "format":
                self._format(out, value, at)
            elif key in _REFUSED and not _no_effect(key, value, schema):
                self._rewrite(out, key, value, schema, at)
        self._names(out, at)
        return _without_boolean_bounds(out)

    def _names(self, out: dict[str, Any], at: str) -> None:
        parts = [out, *(part for part in out.get("allOf", ()) if isinstance(part, dict))]
        listed = set[str]().union(*map(_listed_names, parts))
        for part in parts:
            _drop_listed_patterns(part, listed)
        if _counts_repeated_names(out):
            least = out.pop("minProperties")
            self._refuse(f"'minProperties': {least} for names that may stand twice", at, _COUNTED)

    def _named(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error(f"{at} must be an object of schemas")
        return {k: self._read(v, f"{at}/{_pointer(k)}") for k, v in value.items()}

    def _listed(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(f"{at} must be a list of schemas")
        return [self._read(v, f"{at}/{i}") for i, v in enumerate(value)]

    def _reference(self, out: dict[str, Any], value: Any, at: str) -> None:
        if isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out["$ref"] = self.root + value[1:]
        else:
            self._refuse(f"'$ref' to {value!r}", at, "refer to '#/$defs/...' in the same schema")

    def _format(self, out: dict[str, Any], value: Any, at: str) -> None:
        if not isinstance(value, str):
            raise self._error(f"'format' at {at} must be a text")
        if value in _FORMATS:
            out["format"] = value
        elif value in _REFUSED_FORMATS:
            self._refuse(f"'format': {value!r}", at, "leave it out or use 'pattern'")

    def _rewrite(self, out: dict[str, Any], key: str, value: Any, schema: Any, at: str) -> None:
        composed = {"anyOf", "oneOf", "allOf", "$ref"} & set(schema)
        if key == "propertyNames" and not {"properties", "patternProperties"} & set(schema):
            rest = self._read(schema.get("additionalProperties", True), f"{at}/{key}")
            names = _allowed_names(value)
            if names is not None and _is_list_of_names(names):
                out.pop("additionalProperties", None)
                out.update(_only(names, rest))
                return
        if key == "unevaluatedProperties" and value is False and not composed:
            out.setdefault("additionalProperties", False)
            return
        self._refuse(f"'{key}'", at, "leave it out or say it with other keywords")

    def _refuse(self, what: str, at: str, remedy: str) -> None:
        message = f"{what} at {at} is not supported"
        if not self.lenient:
            raise self._error(f"{message}; {remedy}")
        if len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append(f"{self.where}: {message} and was left out")

    def _error(self, message: str) -> BadRequest:
        return BadRequest(f"{self.where}: {message}", param=self.where)


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _no_effect(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "uniqueItems":
        return value is False or schema.get("maxItems") in (0, 1)
    if key == "propertyNames":
        return value is True or value in ({}, {"type": "string"})
    if key == "if":
        return not {"then", "else"} & set(schema)
    if key in ("unevaluatedProperties", "unevaluatedItems"):
        return value is True or value == {}
    return key.startswith("depend") and value == {}


def _allowed_names(value: Any) -> dict[str, Any] | None:
    """As a pattern or a list of names. `None`: it is neither."""
    if not isinstance(value, Mapping):
        return None
    rules = {k: v for k, v in value.items() if (k, v) != ("type", "string")}
    return rules if len(rules) == 1 and set(rules) <= {"pattern", "enum", "const"} else None


def _is_list_of_names(names: Mapping[str, Any]) -> bool:
    return isinstance(names.get("pattern", ""), str) and isinstance(names.get("enum", []), list)


def _only(names: dict[str, Any], rest: Any) -> dict[str, Any]:
    if "pattern" in names:
        return {"patternProperties": {names["pattern"]: rest}, "additionalProperties": False}
    listed = names["enum"] if "enum" in names else [names["const"]]
    return {"properties": {str(name): rest for name in listed}, "additionalProperties": False}


def _listed_names(schema: Mapping[str, Any]) -> set[str]:
    needed = schema.get("required")
    names = needed if isinstance(needed, list) else ()
    return {*schema.get("properties", ()), *(name for name in names if isinstance(name, str))}


def _drop_listed_patterns(schema: dict[str, Any], names: set[str]) -> None:
    """Move patterns that only the listed `names` match to these names. llguidance would have no
    name left for such a pattern: after a comma, no text could follow."""
    left = {}
    for pattern, rule in schema.pop("patternProperties", {}).items():
        matched = names_of_pattern(pattern)
        if matched is None or not matched <= names:
            left[pattern] = rule
            continue
        known = schema.setdefault("properties", {})
        for name in sorted(matched):
            known[name] = {"allOf": [known[name], rule]} if name in known else rule
    if left:
        schema["patternProperties"] = left


def _counts_repeated_names(schema: Mapping[str, Any]) -> bool:
    """Whether the same name twice would satisfy `minProperties`."""
    least, needed = schema.get("minProperties"), schema.get("required")
    count = len(needed) if isinstance(needed, list) else 0
    if not isinstance(least, int | float) or least < count + 2 or {"const", "enum"} & set(schema):
        return False
    kinds = schema.get("type", "object")
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    return bool(is_open) and ("object" in kinds if isinstance(kinds, str | list) else True)


def _without_boolean_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert draft 4's `exclusiveMinimum: true` beside `minimum`."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        flag = schema.get(exclusive)
        if isinstance(flag, bool):
            del schema[exclusive]
        if flag is True and bound in schema:
            schema[exclusive] = schema.pop(bound)
    return schema
