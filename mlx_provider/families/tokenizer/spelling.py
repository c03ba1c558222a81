"""Hides control tokens in a client's strings from the chat template and the tokenizer, and spells
them in letters in the rendered text.

One character of each is replaced by a private one that occurs nowhere in the input, has the same
length and no case, is not white space and passes JSON. So the tokenizer finds only the template's
own control tokens. A pre-tokenizer then reveals the characters to the model.

`sanitize_control_tokens` of transformers 5.23 does not suffice: it lacks keys of mappings, tokens
that a template joins or a normalizer makes, vocabularies with control tokens, and offsets, and it
renders in this process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from ...errors import BadRequest
from .control_tokens import SPACE_SIGN, UNKNOWN, ControlTokens

MARKS = (
    *(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFD)),
    range(0xA000, 0xA48D),
)
"""Private characters, and Yi syllables for normalizers that drop those."""

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

    def mend(self, text: str) -> str:
        """A rendered text in which marks in ASCII JSON form are restored."""
        return with_signs(text, {json.dumps(mark)[1:-1]: mark for mark in self.marks})

    def escape(self, text: str) -> str:
        """With a visible `\\uXXXX` in place of each hidden character."""
        return with_signs(text, {mark: f"\\u{ord(char):04x}" for mark, char in self.marks.items()})

    def without(self, lost: Mapping[str, str]) -> Hidden:
        """With escapes in place of marks that a template changes or drops."""
        kept = {mark: char for mark, char in self.marks.items() if mark not in lost}
        return _change_strings(self, replace(self, marks=lost).escape, kept)


def hide(control: ControlTokens, given: Hidden, taken: str = "") -> Hidden:
    """Input in which no string of the client holds a control token. `taken`: text whose characters
    cannot be marks, besides those of the input."""
    strings: list[str] = []

    def note(text: str) -> str:
        strings.append(text)
        return text

    _change_strings(given, note, {})
    breaks = {text: places for text in strings if (places := control.breaks(text))}
    if not breaks:
        return given
    letters = {text[i] for text, places in breaks.items() for i in places}
    free = free_marks(control, "\0".join([taken, *strings]), len(letters))
    signs = dict(zip(sorted(letters), free, strict=True))

    def change(text: str) -> str:
        return _replace(text, breaks[text], signs) if text in breaks else text

    return _change_strings(given, change, {mark: char for char, mark in signs.items()})


def with_signs(text: str, signs: Mapping[str, str]) -> str:
    """No sign may hold one of the replaced texts."""
    for char, sign in signs.items():
        text = text.replace(char, sign)
    return text


def _change_strings(
    given: Hidden, change: Callable[[str], str], marks: Mapping[str, str]
) -> Hidden:
    return Hidden(
        [_message(message, change) for message in given.messages],
        _map(given.tools, change),
        {name: _map(value, change) for name, value in given.variables.items()},
        marks,
    )


def free_marks(control: ControlTokens, text: str, count: int) -> list[str]:
    """Characters that do not occur in `text`, neither literally nor as JSON escapes."""
    present = {*text}
    escaped = {match[0].lower() for match in re.finditer(r"(?i)\\u[0-9a-f]{4}", text)}
    unused = (
        mark
        for mark in map(chr, chain(*MARKS))
        if mark not in present and json.dumps(mark)[1:7] not in escaped and control.keeps(mark)
    )
    found = [*islice(unused, count)]
    if len(found) < count:
        raise BadRequest("the text holds every private character of Unicode", param="messages")
    return found


def _message(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Roles and field names are normalised, so they are never the client's text."""
    return {k: v if k == "role" else _map(v, change) for k, v in message.items()}


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map(item, change) for item in value]
    return value


def _replace(text: str, places: Sequence[int], signs: Mapping[str, str]) -> str:
    codes = bytearray(text, "utf-32-le", "surrogatepass")
    for place in places:
        codes[4 * place : 4 * place + 4] = signs[text[place]].encode("utf-32-le")
    return codes.decode("utf-32-le", "surrogatepass")


Located = tuple[list[int], list[tuple[int, int]]]
"""Ids of tokens, and the characters of each: (first, end)."""


class Letters:
    """A tokenizer (`fast`) that reads marks as characters after it has found control tokens."""

    def __init__(self, fast: Any, marks: Mapping[str, str]) -> None:
        from tokenizers import Tokenizer
        from tokenizers.pre_tokenizers import PreTokenizer, Sequence

        self.marks = marks
        self._tokenizer = Tokenizer(fast.model)
        if fast.normalizer is not None:
            self._tokenizer.normalizer = fast.normalizer
        steps = [PreTokenizer.custom(self), fast.pre_tokenizer]
        self._tokenizer.pre_tokenizer = Sequence([step for step in steps if step is not None])
        added = fast.get_added_tokens_decoder()
        self._tokenizer.add_tokens(list(added.values()))
        self._ids = {self._tokenizer.token_to_id(t.content): i for i, t in added.items()}

    def pre_tokenize(self, text: Any) -> None:
        """`text`: a `tokenizers.PreTokenizedString`."""
        for mark, char in self.marks.items():
            text.normalize(lambda part, mark=mark, char=char: part.replace(mark, char))

    def encode(self, text: str) -> Located:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [self._ids.get(token, token) for token in encoding.ids], encoding.offsets


def spell(fast: Any, control: ControlTokens, text: str, located: Located) -> Located:
    """With letters in place of each control token that is not written in `text`: a normalizer made
    it of other letters, or the vocabulary itself has it."""
    forbidden = control.content.keys() - {token.id for token in fast.model.tokenize(UNKNOWN)}

    def letters(piece: str) -> list[int]:
        ids = [token.id for token in fast.model.tokenize(piece)]
        if forbidden.isdisjoint(ids):
            return ids
        # a single sign that is only a control token has no other spelling
        return letters(piece[:1]) + letters(piece[1:]) if len(piece) > 1 else []

    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for token, span in zip(*located, strict=True):
        content = control.content[token] if token in forbidden else ""
        spelt = [token] if _is_written(text[slice(*span)], content) else letters(content)
        ids += spelt
        spans += [span] * len(spelt)
    return ids, spans


def _is_written(part: str, content: str) -> bool:
    """Whether a part of the text is literally a token, with the white space that it absorbs."""
    return not content or not part.replace(content, "", 1).replace(SPACE_SIGN, " ").strip()
