"""The texts that a tokenizer reads as control tokens, and their positions in a client's text.

Every added token counts, special or not, except plain vocabulary that some tokenizers store there:
white space, letters, HTML tags. A template joins the parts of a message, may put names between
signs (`<` name `>`), and may remove a mode switch (`/think`), which joins the text around it.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jinja2

from .long_text import starts


class Edges:
    """Positions at which strings of a client end or begin within one of `texts`."""

    def __init__(self, texts: Sequence[str], template: str | None) -> None:
        cuts = [(text, n) for text in texts for n in range(1, len(text))]
        heads, tails = {text[:n] for text, n in cuts}, {text[n:] for text, n in cuts}
        code = _tokens(template)
        strings = [text[1:-1] for kind, text in code if kind == "string"]
        literals = [*strings, *(text for kind, text in code if kind == "data")]
        lengths = self._lengths = range(1, max(map(len, texts), default=1))
        if code:
            written = [each for text in literals for each in (text, text.strip())]
            opens = {text[-n:] for text in written for n in lengths} & heads
            closes = {text[:n] for text in written for n in lengths} & tails
        else:
            signs = [{p for p in parts if not any(map(str.isalnum, p))} for parts in (heads, tails)]
            opens, closes = signs
        self._heads, self._tails = heads, tails if opens else set[str]()
        fields = [
            text for (_, sign), (kind, text) in pairwise(code) if (sign, kind) == (".", "name")
        ]
        # a name that the template looks up or compares is intended
        self._completions = {
            text[start:end]
            for text, start in cuts
            if text[:start] in opens
            for end in range(start + 1, len(text))
            if text[end:] in closes
        }.difference(strings, fields)
        self._removed = {*_removed_texts(code)}
        first = pattern_of({text[0] for text in texts})
        self._removed_or_first = re.compile(f"(?:{pattern_of(self._removed)})|({first})")

    def of(self, text: str) -> Iterator[int]:
        if any(removed in text for removed in self._removed):
            found = self._removed_or_first.finditer(text)
            yield from (match.start() for match in found if match[1])
        core = text.strip()
        if any(core[-n:] in self._heads for n in self._lengths):
            yield len(text.rstrip()) - 1
        if core in self._completions or any(core[:n] in self._tails for n in self._lengths):
            yield len(text) - len(text.lstrip())


def _tokens(template: str | None) -> list[tuple[str, str]]:
    """Kind and text of the parts of a template. Empty: unknown."""
    try:
        found = jinja2.Environment().lex(template or "")  # noqa: S701
        return [(kind, text) for _, kind, text in found if kind != "whitespace"]
    except jinja2.TemplateSyntaxError:
        return []


def _removed_texts(code: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Texts that a template replaces, or at which it splits a text to join it again."""
    calls = {"replace", "split"} if ("name", "join") in code else {"replace"}
    for (_, name), (_, bracket), (kind, text) in zip(code, code[1:], code[2:], strict=False):
        if name in calls and bracket == "(" and kind == "string" and text[1:-1]:
            yield text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")


SPACE_SIGN = "▁"
UNKNOWN = "\U0010fffd"
HTML_TAG = re.compile(
    "</?(?:h[1-6]|[bius]|em|strong|su[bp]|code|blockquote|table|caption|t(?:[rhd]|head|body|foot))>"
)


def is_vocabulary(token: Any, template: str) -> bool:
    """Whether an added token (`tokenizers.AddedToken`) is text: a word, white space, one sign, or
    an HTML tag that the template neither opens nor closes."""
    shown = token.content.replace(SPACE_SIGN, " ").strip()
    pair = (shown.replace("</", "<"), shown.replace("</", "<").replace("<", "</"))
    tag = HTML_TAG.fullmatch(shown) is not None and not any(each in template for each in pair)
    return not token.special and (tag or len(shown) < 2 or shown.isalnum())


class ControlTokens:
    """The control tokens of a tokenizer (`tokenizers.Tokenizer`) with a chat template.

    `reserved`: further texts with a special meaning (media). `template`: the chat template's
    source; `None`: unknown.
    """

    def __init__(
        self, fast: Any, template: str | None = None, reserved: Sequence[str] = ()
    ) -> None:
        added: dict[int, Any] = fast.get_added_tokens_decoder()
        source = template or ""
        self.content = {i: t.content for i, t in added.items() if not is_vocabulary(t, source)}
        normalized = any(added[i].normalized for i in self.content)
        for text in reserved:
            token = fast.token_to_id(text)
            if token is not None:
                self.content.setdefault(token, text)
        self.texts = sorted({*self.content.values(), *reserved} - {""})
        # a template may change the case of other text
        self._find = re.compile(pattern_of(self.texts), re.IGNORECASE)
        self._longest = max(map(len, self.texts), default=1)
        self._edges = Edges(self.texts, template)
        changes = fast.normalizer is not None or any(SPACE_SIGN in text for text in self.texts)
        in_model = (fast.model.token_to_id(text) is not None for text in self.content.values())
        self.reachable = changes and (normalized or any(in_model))
        """Whether text without a literal control token may still encode to the id of one."""
        self._normalizer = fast.normalizer

    def breaks(self, text: str) -> array[int]:
        """Ascending indices of characters to hide so that `text` gives no control token, alone or
        within a template. A text of megabytes may consist only of them."""
        places = array("Q", starts(self._find, text, self._longest))
        for place in self._edges.of(text):
            at = bisect_left(places, place)
            if places[at : at + 1] != array("Q", [place]):
                places.insert(at, place)
        return places

    def keeps(self, mark: str) -> bool:
        return self._normalizer is None or mark in self._normalizer.normalize_str(mark)


def pattern_of(texts: Iterable[str]) -> str:
    """Matches the longest of `texts`. Common prefixes are compared once."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _expression(tree) or "(?!)"


def _expression(node: Mapping[str, Any]) -> str:
    branches = [re.escape(c) + _expression(rest) for c, rest in node.items() if c]
    joined = "|".join(branches)
    if len(branches) > 1 or (branches and "" in node):
        joined = f"(?:{joined})"
    return joined + "?" * bool(branches and "" in node)
