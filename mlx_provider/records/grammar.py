"""How a model writes calls and messages: a constraint forces it, and a parser reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .parameters import value_types


@dataclass(frozen=True)
class TaggedArguments:
    """Arguments written one by one: `key_before KEY key_after VALUE value_after`.

    In `value_after`, `{key}` stands for the parameter's name.
    """

    key_before: str
    key_after: str
    value_after: str
    between: str = ""
    """Text between two arguments."""
    text: tuple[str, str] | None = ("", "")
    """Text before and after a text value; `None`: it is a JSON string."""
    text_key_after: str = ""
    """`key_after` of a text value, if it differs."""
    untyped: Literal["text", "json"] = "text"
    """How a value without a type in its schema is written."""
    barred: tuple[str, ...] = ()
    """Text that no text value may contain, because the parser would not read it as text. What
    closes a value is always barred."""
    keywords: bool = False
    """Keys must be valid Python keywords; a call with other keys has one JSON object."""

    @property
    def tells_text(self) -> bool:
        """Whether text values are written differently from other values."""
        return bool(self.text_key_after) or self.text not in (None, ("", ""))

    def writes_text(self, schema: Any, root: Mapping[str, Any]) -> bool:
        """Whether a value of this schema (references within `root`) may be bare text."""
        types = value_types(schema, root)
        if self.text is None:
            return False
        return "string" in types or (not types and self.untyped == "text")


@dataclass(frozen=True)
class CallGrammar:
    """How one format writes calls: `open before ARGUMENTS after [between before ...] close`.

    In `before`, `{name}` stands for the tool's name and `{digits}` for a number. In `before` or
    `after`, `{id}` stands for the call's id: nine letters and digits.
    """

    before: str
    after: str
    open: str = ""
    close: str = ""
    between: str | None = ""
    """Text between two calls; `None`: the format has one call per reply."""
    tagged: TaggedArguments | None = None
    """`None`: the arguments are one JSON object."""

    @classmethod
    def json(
        cls, start: str, end: str, key: str = "arguments", between: str | None = "\n"
    ) -> CallGrammar:
        """`{"name": NAME, key: ARGUMENTS}` between two markers.

        `end` empty: nothing separates two calls, so there is one per reply.
        """
        before = f'{start}{{"name": "{{name}}", "{key}": '
        return cls(before, f"}}{end}", between=between if end else None)

    @classmethod
    def json_list(cls, start: str, end: str) -> CallGrammar:
        """A JSON list of such objects between two markers."""
        call = cls.json("", "")
        return cls(call.before, call.after, f"{start}[", f"]{end}", between=", ")


@dataclass(frozen=True)
class MessageGrammar:
    """How a format with an address on every message writes one."""

    thought: str
    thought_end: str
    next: str
    """Opens the message after a thought."""
    answer: str
