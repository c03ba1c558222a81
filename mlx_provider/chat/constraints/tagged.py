"""Arguments in formats that write each value between tags, with a rule for each schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...records.json_reading import implied_type, listed_values, resolved, value_types
from ...records.parsing import TaggedArguments
from .schema import (
    ONE_LINE,
    Function,
    SchemaReader,
    Spaces,
    Split,
    json_rule,
    literal,
    plain_pattern,
)

_MAX_PATTERN = 2000
"""Longest pattern that is analysed. The time grows with its square."""


@dataclass
class TaggedArgument:
    rule: str
    name: str
    schema: Any
    function: Function
    tags: TaggedArguments
    spaces: Spaces = field(default_factory=lambda: ONE_LINE)
    warnings: list[str] = field(default_factory=list)

    def rules(self, split: Split) -> list[str]:
        """Key and value with their tags, one rule per line."""
        value = resolved(self.schema, self.function.schema)
        if self.tags.text is not None:
            listed = listed_values(value, self.function.schema) or []
            if any(isinstance(each, str) for each in listed):
                return [f"{self.rule}: {self._listed(listed, split)}"]
        rule, root = self.rule, self.function.schema
        if not self.tags.writes_text(value, root):
            return self._json(rule, split)
        if not self.tags.tells_text or value_types(value, root) == {"string"}:
            return self._text(rule, value, split)
        either = [f"{rule}: {rule}_t | {rule}_j"]
        return either + self._text(f"{rule}_t", value, split) + self._json(f"{rule}_j", split)

    def _json(self, rule: str, split: Split) -> list[str]:
        return [
            f"{rule}: {self._key(split)} {rule}_json {self._after(split)}",
            f"{rule}_json: {json_rule(self._document(), self.spaces)}",
        ]

    def _key(self, split: Split, *, text: bool = False) -> str:
        tags = self.tags
        after = (text and tags.text_key_after) or tags.key_after
        return literal(f"{tags.key_before}{self.name}{after}", split)

    def _after(self, split: Split) -> str:
        return literal(self.tags.value_after.replace("{key}", self.name), split)

    def _listed(self, values: list[Any], split: Split) -> str:
        """A key and one of its values. Strings have their own rule if the format requires it."""
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

    def _text(self, rule: str, value: Mapping[str, Any], split: Split) -> list[str]:
        before, quote = self.tags.text or ("", "")
        closing = quote + self.tags.value_after.replace("{key}", self.name)
        head = f"{rule}: {self._key(split, text=True)} {literal(before, split)}"
        terminal = f"{rule}_TEXT".upper()
        text = f"{terminal}: {self._text_pattern(value)}{self.without(closing.strip())}"
        first, *rest = split(closing)
        if isinstance(first, int):
            return [text, f"{head} {terminal} {literal(closing, split)}"]
        # Lazy: the text ends at the first closing tag.
        suffix = json.dumps(first, ensure_ascii=False)
        beyond = literal(closing[len(first) :], split) if rest else ""
        return [
            text,
            f"{rule}_text[suffix={suffix}]: {terminal}",
            f"{head} {rule}_text {beyond}",
        ]

    def without(self, closing: str) -> str:
        """Exclude texts that the format's parser would not read as text."""
        barred = "|".join(map(plain_pattern, filter(None, (closing, *self.tags.barred))))
        return f" & ~/(?s:.*)({barred})(?s:.*)/" if barred else ""

    def _document(self) -> dict[str, Any]:
        moved = SchemaReader("tools", root="#/$defs/root")
        value = moved.read(self.schema)
        document = value if isinstance(value, dict) else {} if value else {"anyOf": []}
        for kind in implied_type(document):  # one at most
            document = {**document, "type": kind}
        return {**document, "$defs": {"root": moved.read(self.function.schema)}}

    def _text_pattern(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        length = f"/(?s:.{{{least},{'' if most is None else most}}})/"
        pattern = schema.get("pattern")
        whole = self.function.text or (None if pattern is None else whole_text(pattern))
        if pattern is not None and whole is None:
            self._note(f"pattern {pattern!r}")
        if "format" in schema:
            self._note(f"format {schema['format']!r}")
        return length if whole is None else f"/{whole}/ & {length}"

    def _note(self, what: str) -> None:
        if self.function.strict:
            where = f"tool {self.function.name!r}, parameter {self.name!r}"
            self.warnings.append(f"{where}: the {what} is not enforced in this model's call format")


def whole_text(pattern: str) -> str | None:
    """A schema's `pattern`, which may match anywhere, as a pattern of the whole text. `None`: it
    has inner anchors, alternatives at the top level or lookarounds, or is too long."""
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
