"""Pieces of llguidance's Lark: text, special tokens, JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Spaces = Mapping[str, Any]
"""llguidance's `x-guidance` options. Always bounded: a model that pads with white space would never
end its reply."""
ONE_LINE: Spaces = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
"""At most one space after a comma or a colon."""
INDENTED: Spaces = {"whitespace_pattern": r" |\n( {0,40}|\t{0,10})"}
"""One space, or one line end with its indentation."""
_SHOWS_LINES = re.compile(r"\b(?:arguments|tool_calls?)\b[^{}%]{0,80}\btojson\s*\(\s*indent")


def spaces_of(template: str | None) -> Spaces:
    return INDENTED if template and _SHOWS_LINES.search(template) else ONE_LINE


Split = Callable[[str], list[str | int]]
"""Cuts text at special tokens, which become their ids."""


def json_rule(schema: Mapping[str, Any], spaces: Spaces) -> str:
    return "%json " + json.dumps({"x-guidance": dict(spaces), **schema}, ensure_ascii=False)


def literal(text: str, split: Split) -> str:
    """Text as a Lark expression. Empty text gives an empty string."""
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
        for piece in split(text)
    )


@dataclass(frozen=True)
class Function:
    name: str
    schema: dict[str, Any]
    """JSON schema of an object, in supported keywords."""
    strict: bool = False
    text: str = ""
