"""Writes regular expressions for the slashes of a Lark grammar. They are made of a client's Lark
grammar (its text then stands in a call, bare or as JSON), a plain text, or a schema's `pattern`."""

import json
import re
from collections.abc import Mapping

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*|->\s*\w+)
    |%import\s+common\.(?P<common>\w+)(?:\s*->\s*(?P<renamed>\w+))?
    |[!?]?(?P<rule>\w+)(?:\.\d+)?\s*:
    |"(?P<first>(?:\\.|[^"\\]))"\s*\.\.\s*"(?P<last>(?:\\.|[^"\\]))"
    |(?P<text>"(?:\\.|[^"\\])*")(?P<folded>i?)
    |/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[imsux]*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<plain>[()|?*+\[\]]|\{\d*,?\d*\})
    |(?P<other>%\w+|.)""",
    re.VERBOSE | re.DOTALL,
)
_BRACKETS = {"(": "(?:", "[": "(?:", "]": ")?"}
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Of Lark's `grammars/common.lark`."""
LONGEST_PATTERN = 100_000  # characters of an expanded rule
_MAX_PATTERN = 2000
"""Longest `pattern` of a schema that is analysed. The time grows with its square."""


def text_pattern(lark: str) -> str:
    """A grammar as one regular expression, which can stand in a schema. Raises `ValueError` that
    names what has none, such as a rule that refers to itself."""
    rules: dict[str, list[tuple[bool, str]]] = {}
    """Pieces of each rule: (whether it is a rule's name, the name or a regular expression)."""
    rule = ""
    for found in _TOKEN.finditer(lark):
        if found["other"]:
            raise ValueError(found["other"])
        if found["common"]:
            if found["common"] not in _COMMON:
                raise ValueError(found[0])
            pattern = f"(?:{_COMMON[found['common']]})"
            rules[found["renamed"] or found["common"]] = [(False, pattern)]
        elif found["rule"]:
            rule = found["rule"]
            rules[rule] = []
        elif not found["skip"]:
            rules[rule].append((bool(found["name"]), found["name"] or _convert_piece(found)))
    return _expand_rule("start", rules, {})


def _convert_piece(found: re.Match[str]) -> str:
    if found["plain"]:
        return _BRACKETS.get(found["plain"], found["plain"])
    if found["first"]:
        return f"[{re.escape(found['first'])}-{re.escape(found['last'])}]"
    if found["regex"]:
        flags = "".join(sorted(set(found["flags"]) - {"u"}))
        return f"(?{flags}:{found['regex']})"
    text = plain_pattern(json.loads(found["text"], strict=False))
    return f"(?{found['folded']}:{text})"


def plain_pattern(text: str) -> str:
    """A regular expression that matches only this text, for use between slashes."""
    return re.sub(r"[!-/:;=?@\[-^`{-~]", r"\\\g<0>", text).replace("\n", "\\n")


def _expand_rule(
    rule: str, rules: Mapping[str, list[tuple[bool, str]]], known: dict[str, str]
) -> str:
    """`known`: expressions of rules; empty while a rule is being expanded."""
    if rule not in known:
        known[rule] = ""
        pieces = rules.get(rule, ())
        parts = [_expand_rule(x, rules, known) if is_name else x for is_name, x in pieces]
        known[rule] = f"(?:{''.join(parts)})"
        if len(known[rule]) > LONGEST_PATTERN:
            raise ValueError(f"a text of more than {LONGEST_PATTERN} characters")
    if not known[rule]:
        raise ValueError(f"the rule {rule!r}, which refers to itself,")
    return known[rule]


def between_slashes(regex: str) -> str:
    """A regular expression, with slashes and line ends escaped."""
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", regex, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


def whole_text(pattern: str) -> str | None:
    """A schema's `pattern`, which may match anywhere, as a pattern of the whole text. `None`: it
    has inner anchors, top-level alternatives, a `(?...)` other than `(?:...)`, or is too long."""
    if len(pattern) > _MAX_PATTERN:
        return None
    # look at what is outside escapes and classes; then remove groups, from the innermost on
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
    return ("" if head else "(?s:.*)") + between_slashes(body) + ("" if tail else "(?s:.*)")
