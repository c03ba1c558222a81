"""Arguments between tags: values are bare text, with types from the tool's schema."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol

from mlx_provider.records import Tools

from .lookahead import Repeats
from .schema import Unknown, as_json, is_text, listed, types


class Report(Protocol):
    def call(self, name: str) -> None: ...
    def arguments(self, text: str) -> None: ...
    def end_call(self) -> None: ...


class Unreported:
    """Drops a call of which only the length is needed."""

    def call(self, name: str) -> None: ...
    def arguments(self, text: str) -> None: ...
    def end_call(self) -> None: ...


@dataclass
class TextValue:
    """JSON string text of a value that arrives in pieces. `lines`: one line end after the opening
    tag and one before the closing tag belong to the tags."""

    report: Report
    lines: bool
    begun: bool = False
    held: str = ""

    def piece(self, text: str) -> None:
        if not text:
            return
        if not self.begun and self.lines:
            self.begun = True
            text = text.removeprefix("\n")
        text = self.held + text
        self.held = "\n" if self.lines and text.endswith("\n") else ""
        self.show(text[: len(text) - len(self.held)])

    def show(self, text: str) -> None:
        self.report.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


@dataclass
class Arguments:
    report: Report
    tools: Tools
    name: str
    unknown: Unknown = "string"
    lines: bool = True
    begun: bool = False
    keys: list[str] = field(default_factory=list)
    _text: TextValue | None = None
    _parts: list[str] = field(default_factory=list)
    _first: str = ""
    _last: str = ""

    def begin(self) -> None:
        """Report the call's name. From then on, it is a call."""
        if not self.begun:
            self.begun = True
            self.report.call(self.name)

    def open(self, key: str, force_text: bool | None = None, *, bracket: bool = False) -> None:
        """`force_text`: the format says whether it is a string. `bracket`: the value begins with
        one, and may be JSON if no type is known."""
        self.begin()
        self.report.arguments(("{" if not self.keys else ", ") + json.dumps(key) + ": ")
        self.keys.append(key)
        wanted = types(self.tools, self.name, key)
        text = is_text(wanted, self.unknown) and (bool(wanted) or not bracket)
        text = text if force_text is None else force_text
        self._parts, self._first, self._last = [], "", ""
        self._text = TextValue(self.report, self.lines) if text else None
        if text:
            self.report.arguments('"')

    @property
    def is_text(self) -> bool:
        return self._text is not None

    @property
    def repeats(self) -> Repeats:
        """The meaning of a doubled closing tag. It has a line of its own if the opening tag has
        one."""
        if not self.lines or not self._first.startswith("\n"):
            return "apart"
        return "mistake" if self._last == "\n" else "text"

    def piece(self, text: str) -> None:
        self._first, self._last = self._first or text[:1], text[-1:] or self._last
        if self._text is not None:
            self._text.piece(text)
        else:
            self._parts.append(text)

    def close(self, force_json: bool = False) -> None:
        if self._text is not None:
            self.report.arguments('"')
            return
        text = "".join(self._parts)
        if self.lines:
            text = text.removeprefix("\n").removesuffix("\n")
        called = self.tools, self.name, self.keys[-1]
        wanted = frozenset[str]() if force_json else types(*called)
        unknown: Unknown = "json" if force_json else self.unknown
        self.report.arguments(as_json(text, wanted, unknown, listed(*called)))

    def end(self) -> None:
        self.begin()
        self.report.arguments("}" if self.keys else "{}")
        self.report.end_call()
