"""Hides control tokens in a client's strings from the chat template and the tokenizer.

One character of each is replaced by a private one that occurs nowhere in the input, has the same
length and no case, is not white space and passes JSON. So the tokenizer finds only the template's
own control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from .control_tokens import ControlTokens

MARKS = (
    *(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFD)),
    range(0xA000, 0xA48D),
)
"""Private characters, and Yi syllables for normalizers that drop those."""

JOINED = 4096
"""Replacements whose parts are in memory at once. A part takes about a hundred bytes."""

Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]


@dataclass(frozen=True)
class Hidden:
    messages: Messages
    tools: Messages
    variables: Variables
    marks: Mapping[str, str] = field(default_factory=dict)
    """Private character -> the client's character."""

    def reveal(self, text: str) -> str:
        return with_signs(text, self.marks)

    def mended(self, text: str) -> str:
        """A rendered text in which marks in ASCII JSON form are restored."""
        for mark in self.marks:
            text = text.replace(json.dumps(mark)[1:-1], mark)
        return text

    def lost(self, text: str) -> frozenset[str]:
        return frozenset(char for mark, char in self.marks.items() if mark not in text)


def hide(
    control: ControlTokens,
    given: Hidden,
    *,
    escaped: Container[str] | None = (),
    taken: str = "",
) -> Hidden:
    """Input in which no string of the client holds a control token.

    `escaped`: characters to write as a visible `\\uXXXX` instead of a mark; `None`: all. `taken`:
    text whose characters cannot be marks, besides those of the input.
    """
    strings = _strings(given)
    touched = {text for text in strings if control.touched(text)}
    if not touched:
        return given
    breaks = {text: control.breaks(text) for text in touched}
    letters = {text[i] for text, places in breaks.items() for i in places}
    plain = letters if escaped is None else {c for c in letters if c in escaped}
    free = filter(control.keeps, free_marks("\0".join([taken, *strings])))
    marks = dict(zip(free, sorted(letters - plain), strict=False))
    # characters without a mark get their JSON escape
    signs = {c: f"\\u{ord(c):04x}" for c in letters} | {c: mark for mark, c in marks.items()}

    def change(text: str) -> str:
        places = breaks.get(text)
        return text if places is None else _replaced(text, places, signs)

    return _changed(given, change, marks)


def revealed(hidden: Hidden, signs: Mapping[str, str]) -> Hidden:
    return _changed(hidden, lambda text: with_signs(text, signs), {})


def with_signs(text: str, signs: Mapping[str, str]) -> str:
    """No sign may be one of the replaced characters."""
    for char, sign in signs.items():
        text = text.replace(char, sign)
    return text


def _changed(given: Hidden, change: Callable[[str], str], marks: Mapping[str, str]) -> Hidden:
    return Hidden(
        [_message(message, change) for message in given.messages],
        _mapped(given.tools, change),
        {name: _mapped(value, change) for name, value in given.variables.items()},
        marks,
    )


def free_marks(text: str) -> Iterator[str]:
    """Characters that do not occur in `text`, neither literally nor as JSON escapes."""
    present = {*text}
    escaped = {match[0].lower() for match in re.finditer(r"(?i)\\u[0-9a-f]{4}", text)}
    for mark in map(chr, chain(*MARKS)):
        if mark not in present and json.dumps(mark)[1:7] not in escaped:
            yield mark


def _message(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Roles and field names are normalised, so they are never the client's text."""
    return {k: v if k == "role" else _mapped(v, change) for k, v in message.items()}


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


def _replaced(text: str, places: Sequence[int], signs: Mapping[str, str]) -> str:
    joined, at = [], 0
    for first in range(0, len(places), JOINED):
        parts = []
        for place in places[first : first + JOINED]:
            parts += [text[at:place], signs[text[place]]]
            at = place + 1
        joined.append("".join(parts))
    return "".join([*joined, text[at:]])


def _strings(given: Hidden) -> list[str]:
    found: list[str] = []
    for message in given.messages:
        for key, value in message.items():
            if key != "role":
                _gather(value, found)
    _gather(given.tools, found)
    _gather(list(given.variables.values()), found)
    return found


def _gather(value: Any, found: list[str]) -> None:
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _gather(key, found)
            _gather(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _gather(item, found)
