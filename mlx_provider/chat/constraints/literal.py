"""Pieces of llguidance's Lark: text, special tokens, JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# A model that pads with white space would never come to an end: one space, or one line end
# with its indentation, wherever JSON allows white space.
WHITESPACE = r" |\n[ \t]{0,40}"

Split = Callable[[str], list[str | int]]
"""Text cut at special tokens: pieces of text, and token ids in place of the special ones."""


def json_rule(schema: Mapping[str, Any]) -> str:
    """A schema as a Lark expression."""
    options = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return "%json " + json.dumps({**options, **schema}, ensure_ascii=False)


def literal(text: str, split: Split) -> str:
    """Text as a Lark expression, special tokens as such; empty text gives an empty string."""
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
