"""Arguments that a format writes one by one between tags, each by its own schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...records.grammar import TaggedArguments
from .literal import Function, Split, json_rule, literal
from .schema import SchemaReader

_MAX_LISTED = 10_000
"""Values of one list of choices; a longer one is held as JSON."""
_MAX_PATTERN = 2000
"""Characters of a pattern that is looked into; the time grows with their square."""


@dataclass
class TaggedArgument:
    """One parameter of a function; `rule` is the name of its rule in the grammar."""

    rule: str
    name: str
    schema: Any
    function: Function
    tags: TaggedArguments
    warnings: list[str] = field(default_factory=list)

    def rules(self, split: Split) -> list[str]:
        """Key and value with their tags, one rule a line."""
        value = resolved(self.schema, self.function.schema)
        if self.tags.text is not None:
            listed = _listed_values(value, self.function.schema)
            if listed is not None:
                return [f"{self.rule}: {self._listed(listed, split)}"]
            if _takes_text(value, self.function.schema):
                return self._text(value, split)
        return [
            f"{self.rule}: {self._key(split)} {self.rule}_json {self._after(split)}",
            f"{self.rule}_json: {json_rule(self._document())}",
        ]

    def _key(self, split: Split, *, text: bool = False) -> str:
        tags = self.tags
        after = (text and tags.text_key_after) or tags.key_after
        return literal(f"{tags.key_before}{self.name}{after}", split)

    def _after(self, split: Split) -> str:
        return literal(self.tags.value_after.replace("{key}", self.name), split)

    def _listed(self, values: list[Any], split: Split) -> str:
        """A key and one of its values, texts apart from others where the format wants that."""
        around = self.tags.text or ("", "")
        texts = [value for value in values if isinstance(value, str)]
        others = [json.dumps(value) for value in values if not isinstance(value, str)]
        forms = []
        if texts:
            before, after = (literal(mark, split) for mark in around)
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in texts)
            forms.append(f"{self._key(split, text=True)} {before} ({words}) {after}")
        if others:
            forms.append(f"{self._key(split)} ({' | '.join(map(json.dumps, others))})")
        return f"({' | '.join(forms)}) {self._after(split)}"

    def _text(self, value: Mapping[str, Any], split: Split) -> list[str]:
        """A text up to the closing tag."""
        before, quote = self.tags.text or ("", "")
        closing = quote + self.tags.value_after.replace("{key}", self.name)
        head = f"{self.rule}: {self._key(split, text=True)} {literal(before, split)}"
        terminal = f"{self.rule}_TEXT".upper()
        text = f"{terminal}: {self._text_pattern(value)}"
        first, *rest = split(closing)
        if isinstance(first, int):
            return [text, f"{head} {terminal} {literal(closing, split)}"]
        # Lazy: the text ends where the closing tag first appears.
        suffix = json.dumps(first, ensure_ascii=False)
        beyond = literal(closing[len(first) :], split) if rest else ""
        return [
            text,
            f"{self.rule}_text[suffix={suffix}]: {terminal}",
            f"{head} {self.rule}_text {beyond}",
        ]

    def _document(self) -> dict[str, Any]:
        """The value's schema with what it refers to."""
        moved = SchemaReader("tools", root="#/$defs/root")
        value = moved.read(self.schema)
        document = value if isinstance(value, dict) else {} if value else {"anyOf": []}
        whole = {**document, "$defs": {"root": moved.read(self.function.schema)}}
        return whole if self.tags.escapes else without_escapes(whole)

    def _text_pattern(self, schema: Mapping[str, Any]) -> str:
        """A regular expression for the text of a string."""
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        length = f"/(?s:.{{{least},{'' if most is None else most}}})/"
        pattern = schema.get("pattern")
        whole = None if pattern is None else whole_text(pattern)
        if pattern is not None and whole is None:
            self._note(f"pattern {pattern!r}")
        if "format" in schema:
            self._note(f"format {schema['format']!r}")
        return length if whole is None else f"/{whole}/ & {length}"

    def _note(self, what: str) -> None:
        if self.function.strict:
            where = f"tool {self.function.name!r}, parameter {self.name!r}"
            self.warnings.append(f"{where}: the {what} is not enforced in this model's call format")


def listed_parameters(schema: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Parameters by name, and the names of those that must be given, through references."""
    properties: dict[str, Any] = {}
    required: set[str] = set()
    for part in (resolved(schema, schema), schema, *schema.get("allOf", ())):
        found = resolved(part, schema) if part is not schema else schema
        properties.update(found.get("properties", {}))
        required.update(found.get("required", ()))
    return properties, required


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema that a chain of references ends at."""
    for _ in range(20):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        target: Any = root
        for word in schema["$ref"].split("/")[1:]:
            key = word.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        schema = target
    return schema if isinstance(schema, dict) else {}


def without_escapes(schema: Any) -> Any:
    """The schema with strings that need no escapes in JSON, where it says nothing else of them."""
    if isinstance(schema, list):
        return [without_escapes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value if key in ("enum", "const") else without_escapes(value)
        for key, value in schema.items()
    }
    kinds = schema.get("type")
    told = {"enum", "const", "pattern", "format"} & set(schema)
    if not told and (kinds == "string" or (isinstance(kinds, list) and "string" in kinds)):
        found["pattern"] = _NO_ESCAPES
    return found


_NO_ESCAPES = r'^[^"\\\x00-\x1f]*$'


def _listed_values(schema: dict[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    """The values of a list of choices that holds texts; `None`: it is none."""
    values = _choices(schema, root, {})
    if not values or not any(isinstance(value, str) for value in values):
        return None
    return values


def _choices(
    schema: dict[str, Any], root: Mapping[str, Any], known: dict[int, list[Any] | None]
) -> list[Any] | None:
    """All values of a schema that lists them; `None`: it does not.

    known: what was found of the schemas met before, as many may refer to one, or to themselves.
    """
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if schema.get("type") == "null":
        return [None]
    if id(schema) not in known:
        known[id(schema)] = None
        known[id(schema)] = _joined(schema.get("anyOf", ()), root, known)
    return known[id(schema)]


def _joined(
    branches: Iterable[Any], root: Mapping[str, Any], known: dict[int, list[Any] | None]
) -> list[Any] | None:
    values: list[Any] = []
    for branch in branches:
        found = _choices(resolved(branch, root), root, known)
        if found is None or len(values) + len(found) > _MAX_LISTED:
            return None
        values += found
    return values or None


def _takes_text(schema: dict[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a bare text may stand for the value."""
    todo, known = [schema], set[int]()
    while todo:
        each = todo.pop()
        kinds = each.get("type")
        if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
            return True
        if id(each) not in known:
            known.add(id(each))
            todo += [resolved(b, root) for b in (*each.get("anyOf", ()), *each.get("oneOf", ()))]
    return False


def whole_text(pattern: str) -> str | None:
    """A schema's `pattern`, which may match anywhere, as an expression for the whole text.

    `None`: it has anchors inside, alternatives at the top, looks around, or is very long.
    """
    if len(pattern) > _MAX_PATTERN:
        return None
    plain = re.sub(r"\\.|\[(?:\\.|[^]\\])*\]", "", pattern, flags=re.DOTALL)
    head, tail = plain.startswith("^"), plain.endswith("$")
    inside = plain[head : len(plain) - tail]
    while (fewer := re.sub(r"\([^()]*\)", "", inside)) != inside:
        if re.search(r"\(\?(?!:)", inside) or re.search(r"[$^]", inside):
            return None
        inside = fewer
    if re.search(r"[$^|()]", inside):
        return None
    body = pattern[head : len(pattern) - tail]
    escaped = re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", body, flags=re.DOTALL)
    return ("" if head else "(?s:.*)") + escaped.replace("\n", "\\n") + ("" if tail else "(?s:.*)")
