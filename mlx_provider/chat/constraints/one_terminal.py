"""A Lark grammar as one terminal, so that its text can stand in a call: bare, or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from re import _constants as ops, _parser as parser  # type: ignore[attr-defined]  # isort: skip

ESCAPES = {'"': r"\\\"", "\\": r"\\\\", "\n": r"\\n", "\t": r"\\t", "\r": r"\\r", "\f": r"\\f"}
"""Characters that JSON escapes, with a regular expression of each escape."""
PLAIN = r'[^"\\\x00-\x1f]'
IMPORTED = {"LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+"}
TOKEN = re.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |(?P<text>"(?:\\.|[^"\\])*")(?P<folded>i?)
    |/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
    |%import\s+common\.(?P<name>\w+)(?P<renamed>\s*->\s*\w+)?
    |(?P<other>%\w+)
    |(?P<alias>->\s*\w+)
    |(?<!\w)[!?]?(?P<rule>_?[a-z]\w*)""",
    re.VERBOSE,
)
CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}


def one_terminal(lark: str, *, escaped: bool, without: str = "", closed: str = "") -> str:
    """The grammar as one terminal for a whole text, because llguidance ends a terminal without
    looking at what follows; so no rule may refer to itself. `escaped`: the text is inside a JSON
    string. `without`: Lark that excludes texts, to follow the terminal. `closed`: text at whose
    first place the terminal ends. Raises `ValueError` that names what cannot be converted."""
    rules = TOKEN.sub(_escaped if escaped else _converted, lark)
    suffix = f"[suffix={json.dumps(closed, ensure_ascii=False)}]" if closed else ""
    whole = f"WHOLE_TEXT: {_terminal('start')}{without}"
    return f"start: whole_text\nwhole_text{suffix}: WHOLE_TEXT\n{whole}\n{rules}"


def _terminal(rule: str) -> str:
    return f"RULE_{rule.upper()}"


def _converted(found: re.Match[str]) -> str:
    if found["comment"] or found["alias"]:
        return ""
    if found["rule"]:
        return _terminal(found["rule"])
    if found["other"]:
        raise ValueError(found["other"])
    return found[0]


def _escaped(found: re.Match[str]) -> str:
    if found["name"]:
        name = found["name"]
        if name not in IMPORTED:
            return found[0]
        renamed = (found["renamed"] or name).replace("->", "").strip()
        return f"{renamed}: /{escaped_regex(IMPORTED[name])}/"
    if found["text"]:
        text = json.dumps(json.loads(found["text"], strict=False), ensure_ascii=False)
        return json.dumps(text[1:-1], ensure_ascii=False) + found["folded"]
    if found["regex"]:
        return f"/{escaped_regex(found['regex'], found['flags'])}/"
    return _converted(found)


def escaped_regex(pattern: str, flags: str = "") -> str:
    """A regular expression for the escaped text, for use between slashes. Raises `ValueError`."""
    if set(flags) - set("ims"):
        raise ValueError(f"the flags {flags!r}")
    try:
        tree = parser.parse(f"(?{flags}){pattern}" if flags else pattern)
    except re.error as error:
        raise ValueError(f"/{pattern}/: {error}") from None
    ignore = "(?i)" if tree.state.flags & re.IGNORECASE else ""
    return ignore + "".join(_pieces(tree, bool(tree.state.flags & re.DOTALL)))


def _pieces(tree: Any, dots: bool) -> Iterator[str]:
    for kind, value in tree:
        if kind is ops.LITERAL:
            yield _chosen(_one(value))
        elif kind is ops.NOT_LITERAL:
            yield _chosen("^" + _one(value))
        elif kind is ops.ANY:
            yield _chosen(r"\x00-\U0010ffff" if dots else r"^\n")
        elif kind is ops.IN:
            yield _chosen("".join(map(_item, value)))
        elif kind is ops.BRANCH:
            yield "(?:" + "|".join("".join(_pieces(each, dots)) for each in value[1]) + ")"
        elif kind is ops.SUBPATTERN:
            yield "(?:" + "".join(_pieces(value[3], dots)) + ")"
        elif kind is ops.MAX_REPEAT:
            least, most, inner = value
            end = "" if most is ops.MAXREPEAT else int(most)
            yield f"(?:{''.join(_pieces(inner, dots))}){{{int(least)},{end}}}"
        else:
            raise ValueError(f"{str(kind).lower()} in a regular expression")


def _item(item: Any) -> str:
    kind, value = item
    if kind is ops.NEGATE:
        return "^"
    if kind is ops.RANGE:
        return f"{_one(value[0])}-{_one(value[1])}"
    return CATEGORIES[value] if kind is ops.CATEGORY else _one(value)


def _one(code: int) -> str:
    return f"\\U{code:08x}"


def _chosen(inside: str) -> str:
    """A character class: its unescaped characters, and the escapes of the others."""
    pythons = re.compile(f"[{inside}]")
    rusts = re.sub(r"\\U([0-9a-f]{8})", lambda m: f"\\x{{{int(m[1], 16):x}}}", inside)
    forms = [escape for plain, escape in ESCAPES.items() if pythons.fullmatch(plain)]
    return "(?:" + "|".join([f"[[{rusts}]&&{PLAIN}]", *forms]) + ")"


MOST_NAMES = 256


def names_of_pattern(pattern: str) -> set[str] | None:
    """All texts that a pattern matches. `None`: too many, or unknown."""
    try:
        first, *tree, last = parser.parse(pattern)
        anchors = [value for kind, value in (first, last) if kind is ops.AT]
        if anchors == [ops.AT_BEGINNING, ops.AT_END]:
            return _texts(tree, MOST_NAMES)
    except (re.error, ValueError, RecursionError):
        pass
    return None


def _texts(tree: Any, most: int) -> set[str]:
    """Raises `ValueError` for more than `most` texts, and for a part that has no finite list."""
    found = {""}
    for kind, value in tree:
        more = _texts_of(kind, value, most)
        if len(found) * len(more) > most:
            raise ValueError("too many texts")
        found = {text + end for text in found for end in more}
    return found


def _texts_of(kind: Any, value: Any, most: int) -> set[str]:
    if kind is ops.LITERAL:
        return {chr(value)}
    if kind is ops.IN and all(item[0] in (ops.LITERAL, ops.RANGE) for item in value):
        ranges = [(item[1], item[1]) if item[0] is ops.LITERAL else item[1] for item in value]
        if sum(end - start + 1 for start, end in ranges) <= most:
            return {chr(code) for start, end in ranges for code in range(start, end + 1)}
    if kind is ops.BRANCH:
        return set[str]().union(*(_texts(branch, most) for branch in value[1]))
    if kind is ops.SUBPATTERN:
        return _texts(value[3], most)
    if kind is ops.MAX_REPEAT and value[1] is not ops.MAXREPEAT and value[1] <= most:
        least, longest, inner = value
        return set[str]().union(*(_texts([*inner] * n, most) for n in range(least, longest + 1)))
    raise ValueError("a pattern of unknown texts")
