"""How a model writes calls and messages: what a constraint forces, and a parser reads back."""

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
    """What stands around a text value; `None`: it is written as a JSON string."""
    text_key_after: str = ""
    """`key_after` of a text value, where the format tells the two apart."""
    untyped: Literal["text", "json"] = "text"
    """How a value is written whose schema names no type."""
    barred: tuple[str, ...] = ()
    """Text that no text value may hold, since the parser reads more into it than text. What
    closes a value is barred anyway."""
    keywords: bool = False
    """Keys are Python's keywords; a call with others is written with one JSON object."""

    @property
    def tells_text(self) -> bool:
        """Whether a text value is written in another way than other values."""
        return bool(self.text_key_after) or self.text not in (None, ("", ""))

    def writes_text(self, schema: Any, root: Mapping[str, Any]) -> bool:
        """Whether a value of this schema, which refers to `root`, may be written as bare text."""
        types = value_types(schema, root)
        if self.text is None:
            return False
        return "string" in types or (not types and self.untyped == "text")


@dataclass(frozen=True)
class CallGrammar:
    """How one format writes calls: `open before ARGUMENTS after [between before ...] close`.

    In `before`, `{name}` stands for the tool's name and `{digits}` for a number.
    """

    before: str
    after: str
    open: str = ""
    close: str = ""
    between: str | None = ""
    """Text between two calls; `None`: the format knows one call a reply."""
    tagged: TaggedArguments | None = None
    """`None`: the arguments are one JSON object."""

    @classmethod
    def json(
        cls, start: str, end: str, key: str = "arguments", between: str | None = "\n"
    ) -> CallGrammar:
        """`{"name": NAME, key: ARGUMENTS}` between two markers.

        `end` empty: nothing tells where another call begins, so there is one a reply.
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
    """How a format that addresses every message writes one."""

    thought: str
    """What opens a thought."""
    thought_end: str
    next: str
    """What opens the message after a thought."""
    answer: str
    """What opens an answer."""
