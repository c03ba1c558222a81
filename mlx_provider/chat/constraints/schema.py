"""Schemas in grammars for llguidance. `json_rule` and `literal` write Lark. `SchemaReader` adapts a
client's schema, and refuses unsupported keywords by name. The lists follow llguidance 1.9.1
(parser/src/json/schema.rs and docs/json_schema.md)."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import BadRequest

Split = Callable[[str], list[str | int]]  # cuts text at special tokens, which become their ids
Whitespace = Mapping[str, Any]
"""llguidance's `x-guidance` options. Bounded, or a model that pads would never end its reply."""
ONE_LINE: Whitespace = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
INDENTED: Whitespace = {"whitespace_pattern": r" |\n( {0,40}|\t{0,10})"}
_INDENTED_CALLS = re.compile(r"\b(?:arguments|tool_calls?)\b[^{}%]{0,80}\btojson\s*\(\s*indent")
_NAMES = re.compile(r"\^(?:\((?:\?:)?((?:[\w|-]|\[\w\])+)\)|((?:[\w-]|\[\w\])+))\$")


def choose_whitespace(template: str | None) -> Whitespace:
    """The white space that a chat template writes into the JSON of calls."""
    return INDENTED if template and _INDENTED_CALLS.search(template) else ONE_LINE


def json_rule(schema: Mapping[str, Any], spaces: Whitespace) -> str:
    """A Lark expression of the JSON that fits the schema."""
    return "%json " + json.dumps({"x-guidance": dict(spaces), **schema}, ensure_ascii=False)


def quote(text: str) -> str:
    """A string of Lark, which cannot hold the DEL character itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def literal(text: str, split: Split) -> str:
    """A Lark expression of exactly this text; an empty string for empty text."""
    pieces = split(text)
    return " ".join(f"<[{x}]>" if isinstance(x, int) else quote(x) for x in pieces)


@dataclass(frozen=True)
class Function:
    """A tool that can be called. `schema`: of its parameters, as the grammar enforces it."""

    name: str
    schema: dict[str, Any]
    strict: bool = False
    text_regex: str = ""  # the grammar of its only parameter's text; empty: none


def names_of_pattern(pattern: str) -> set[str] | None:
    """All texts that a pattern such as `^(a|b)$` matches; `None`: not only plain alternatives."""
    found = _NAMES.fullmatch(pattern)
    return set(re.sub(r"[][]", "", found[1] or found[2]).split("|")) if found else None


_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SINGLE_SCHEMAS = frozenset({"items", "additionalItems", "additionalProperties"})
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
_COMPOSED = frozenset({"anyOf", "oneOf", "allOf", "$ref"})
_COUNT_REMEDY = "list the names in 'properties' and 'required', or demand one less"
_MAX_WARNINGS = 20


@dataclass
class SchemaReader:
    """Adapts a schema to llguidance. `where`: the request's parameter that holds the schema.
    `lenient`: unsupported keywords are left out, with a line in `warnings`."""

    where: str
    lenient: bool = False
    root: str = "#"  # JSON pointer to the schema in the compiled document
    warnings: list[str] = field(default_factory=list)

    def read(self, schema: Any) -> Any:
        """A copy for llguidance, without annotations and with references moved to `root`. Raises
        `BadRequest` that names the keyword and its place; if `lenient`, only for malformed ones."""
        return self._read(schema, "#")

    def _read(self, schema: Any, at: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._error(f"{at} must be a schema: an object or a boolean")
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _SCHEMA_MAPS:
                out[key] = self._read_named(value, f"{at}/{key}")
            elif key in _SCHEMA_LISTS or (key == "items" and isinstance(value, list)):
                out[key] = self._read_list(value, f"{at}/{key}")
            elif key in _SINGLE_SCHEMAS:
                out[key] = self._read(value, f"{at}/{key}")
            elif key in _PLAIN:
                out[key] = value
            elif key == "$ref":
                self._add_reference(out, value, at)
            elif key == "format":
                self._add_format(out, value, at)
        # sorted, so that `propertyNames` limits the names before `unevaluatedProperties` does
        for key in sorted(filter(_REFUSED.__contains__, schema)):
            if not _express(key, schema, out):
                self._refuse(f"'{key}'", at, "leave it out or say it with other keywords")
        self._adapt_names(out, at)
        return out

    def _adapt_names(self, out: dict[str, Any], at: str) -> None:
        parts = [out, *(part for part in out.get("allOf", ()) if isinstance(part, dict))]
        listed = set[str]().union(*map(_listed_names, parts))
        for part in parts:
            _move_listed_patterns(part, listed)
        if _counts_repeated_names(out):
            least = out.pop("minProperties")
            self._refuse(
                f"'minProperties': {least} for names that may stand twice", at, _COUNT_REMEDY
            )

    def _read_named(self, value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._error(f"{at} must be an object of schemas")
        places = {k: k.replace("~", "~0").replace("/", "~1") for k in value}
        return {k: self._read(v, f"{at}/{places[k]}") for k, v in value.items()}

    def _read_list(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list):
            raise self._error(f"{at} must be a list of schemas")
        return [self._read(v, f"{at}/{i}") for i, v in enumerate(value)]

    def _add_reference(self, out: dict[str, Any], value: Any, at: str) -> None:
        if isinstance(value, str) and (value == "#" or value.startswith("#/")):
            out["$ref"] = self.root + value[1:]
        else:
            self._refuse(f"'$ref' to {value!r}", at, "refer to '#/$defs/...' in the same schema")

    def _add_format(self, out: dict[str, Any], value: Any, at: str) -> None:
        if not isinstance(value, str):
            raise self._error(f"'format' at {at} must be a text")
        if value in _FORMATS:
            out["format"] = value
        elif value in _REFUSED_FORMATS:
            self._refuse(f"'format': {value!r}", at, "leave it out or use 'pattern'")

    def _refuse(self, what: str, at: str, remedy: str) -> None:
        message = f"{what} at {at} is not supported"
        if not self.lenient:
            raise self._error(f"{message}; {remedy}")
        if len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append(f"{self.where}: {message} and was left out")

    def _error(self, message: str) -> BadRequest:
        return BadRequest(f"{self.where}: {message}", param=self.where)


def _express(key: str, given: Mapping[str, Any], out: dict[str, Any]) -> bool:
    """Give `out` the effect of a refused keyword by other keywords. False: that is impossible."""
    value, keys = given[key], given.keys()
    match key:
        case "uniqueItems":
            return value is False or given.get("maxItems") in (0, 1)
        case "if":
            return not keys & {"then", "else"}
        case "unevaluatedProperties" if value is False and not keys & _COMPOSED:
            out.setdefault("additionalProperties", False)
            return True
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems" if value is True:
            return True
        case "propertyNames" if isinstance(value, Mapping):
            return _express_names(value, keys, out)
    return value == {} and key.startswith(("depend", "unevaluated"))


def _express_names(rules: Mapping[str, Any], keys: Collection[str], out: dict[str, Any]) -> bool:
    rest = out.get("additionalProperties", True)
    rules = {name: rule for name, rule in rules.items() if (name, rule) != ("type", "string")}
    if not rules:
        return True
    match rules:
        case {"pattern": str(pattern), **more}:
            replacement: dict[str, Any] = {"patternProperties": {pattern: rest}}
        case {"enum": [*names], **more}:
            replacement = {"properties": {str(name): rest for name in names}}
        case {"const": name, **more}:
            replacement = {"properties": {str(name): rest}}
        case _:
            return False
    if more or "properties" in keys or "patternProperties" in keys:
        return False
    out.update(replacement, additionalProperties=False)
    return True


def _listed_names(schema: Mapping[str, Any]) -> set[str]:
    needed = schema.get("required")
    names = needed if isinstance(needed, list) else ()
    return {*schema.get("properties", ()), *(name for name in names if isinstance(name, str))}


def _move_listed_patterns(schema: dict[str, Any], names: set[str]) -> None:
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
    """Whether a repeated name could satisfy `minProperties`, because llguidance counts it twice."""
    least, needed = schema.get("minProperties"), schema.get("required")
    count = len(needed) if isinstance(needed, list) else 0
    if not isinstance(least, int | float) or least < count + 2 or {"const", "enum"} & set(schema):
        return False
    kinds = schema.get("type", "object")
    is_open = schema.get("additionalProperties") is not False or schema.get("patternProperties")
    return bool(is_open) and ("object" in kinds if isinstance(kinds, str | list) else True)
