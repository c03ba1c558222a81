"""Pieces of llguidance's Lark: text, special tokens, JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Spaces = Mapping[str, Any]
"""White space of JSON, as llguidance's `x-guidance` options. It is always bounded, because a model
that pads with white space would never end its reply."""
ONE_LINE: Spaces = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""As `json.dumps` writes it, or without spaces: at most one space after a comma or a colon."""
INDENTED: Spaces = {"whitespace_pattern": r" |\n( {0,40}|\t{0,10})"}
"""One space or one line end with its indentation, wherever JSON allows white space."""
_SHOWS_LINES = re.compile(r"\b(?:arguments|tool_calls?)\b[^{}%]{0,80}\btojson\s*\(\s*indent")


def spaces_of(template: str | None) -> Spaces:
    """The white space of JSON that a model knows from its chat template."""
    return INDENTED if template and _SHOWS_LINES.search(template) else ONE_LINE


Split = Callable[[str], list[str | int]]
"""Text cut at special tokens: pieces of text, and token ids for the special ones."""


def json_rule(schema: Mapping[str, Any], spaces: Spaces) -> str:
    """A schema as a Lark expression."""
    return "%json " + json.dumps({"x-guidance": dict(spaces), **schema}, ensure_ascii=False)


def literal(text: str, split: Split) -> str:
    """Text as a Lark expression with special tokens. Empty text gives an empty string."""
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
        for piece in split(text)
    )


@dataclass(frozen=True)
class Function:
    """One tool that may be called."""

    name: str
    schema: dict[str, Any]
    """Its parameters, an object, in supported keywords."""
    strict: bool = False
    text: str = ""
    """Lark of its one parameter, a text; empty: any text."""
