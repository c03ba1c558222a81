"""The texts that a tokenizer reads as control tokens, and their positions in a client's text.

Every added token counts, special or not, except plain vocabulary that some tokenizers store there:
white space, letters, HTML tags. A template joins the parts of a message, may put names between
signs (`<` name `>`), and may remove a mode switch (`/think`), which joins the text around it.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jinja2

SLICE = 2**18
"""Characters that are searched in a few milliseconds, in which `re` blocks all other threads."""


def starts(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[int]:
    """Ascending start positions of matches, for a pattern that reads at most `longest` characters.
    A match across the end of a slice may be found twice or hide one that begins within it. Exact
    for patterns that consume nothing, and for whether there is a match at all."""
    for begin in range(0, len(text), SLICE):
        end = begin + SLICE
        for match in pattern.finditer(text, begin, end + longest - 1):
            if match.start() < end:
                yield match.start()


class Edges:
    """Positions at which strings of a client end or begin within one of the sorted `texts`."""

    def __init__(self, texts: Sequence[str], template: str | None) -> None:
        self._texts = texts
        self._mirrored = sorted(text[::-1] for text in texts)
        self._reach = max(map(len, texts), default=1) - 1
        self._first = any_of({text[0] for text in texts})
        self._last = any_of({text[-1] for text in texts})
        opens: Callable[[str], bool] = _is_sign
        closes: Callable[[str], bool] = _is_sign
        written = None if template is None else _read_template(template)
        if written is not None:
            opens = {*self._parts(written.texts, texts, from_end=True)}.__contains__
            closes = {*self._parts(written.texts, self._mirrored, from_end=False)}.__contains__
        removed = [] if written is None else sorted(written.removed, key=len, reverse=True)
        self._cut = re.compile("|".join(map(re.escape, removed)) or "(?!)")
        self._longest_cut = max(map(len, removed), default=1)
        self._cut_or_first = re.compile(f"(?:{self._cut.pattern})|({self._first.pattern})")
        self._opened = any(opens(text[:n]) for text in texts for n in range(1, len(text)))
        self._completions = {*_completions(texts, opens, closes)}
        if written is not None:
            self._completions -= written.names

    def of(self, text: str) -> Iterator[int]:
        yield from self._around_cuts(text)
        core = text.rstrip()
        if core and self._is_begun(core):
            yield len(core) - 1
        if core and self._opened:
            start = len(core) - len(core.lstrip())
            core = core[start:]
            if core in self._completions or self._is_ended(core):
                yield start

    def _around_cuts(self, text: str) -> Iterator[int]:
        """Beginnings of control tokens in a text from which the template removes something."""
        if next(starts(self._cut, text, self._longest_cut), None) is not None:
            yield from (match.start() for match in self._cut_or_first.finditer(text) if match[1])

    def _is_begun(self, core: str) -> bool:
        window = core[max(0, len(core) - self._reach) :]
        starts = self._first.finditer(window)
        return any(_begins(self._texts, window[match.start() :]) for match in starts)

    def _is_ended(self, core: str) -> bool:
        window = core[: self._reach]
        ends = self._last.finditer(window)
        return any(_begins(self._mirrored, window[match.end() - 1 :: -1]) for match in ends)

    def _parts(
        self, literals: Iterable[str], texts: Sequence[str], *, from_end: bool
    ) -> Iterator[str]:
        for literal in literals:
            for n in range(1, min(self._reach, len(literal)) + 1):
                part = literal[-n:] if from_end else literal[:n]
                if _begins(texts, part if from_end else part[::-1]):
                    yield part


def _begins(texts: Sequence[str], part: str) -> bool:
    at = bisect_right(texts, part)
    return at < len(texts) and texts[at].startswith(part)


def any_of(letters: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(letters))) or "(?!)")


def _is_sign(part: str) -> bool:
    return not any(map(str.isalnum, part))


def _completions(
    texts: Iterable[str], opens: Callable[[str], bool], closes: Callable[[str], bool]
) -> Iterator[str]:
    for text in texts:
        starts = [n for n in range(1, len(text)) if opens(text[:n])]
        ends = [n for n in range(2, len(text)) if closes(text[n:])] if starts else []
        yield from (text[start:end] for start in starts for end in ends if start < end)


@dataclass(frozen=True)
class _TemplateTexts:
    texts: list[str]
    """Unchanged and trimmed."""
    names: frozenset[str]
    """Names that it looks up or compares. If it writes one of these, it is intended."""
    removed: frozenset[str]
    """Texts that it replaces, or at which it splits a text to join it again."""


def _read_template(template: str) -> _TemplateTexts | None:
    try:
        tokens = [(kind, text) for _, kind, text in jinja2.Environment().lex(template)]  # noqa: S701
    except jinja2.TemplateSyntaxError:
        return None
    data = [text for kind, text in tokens if kind == "data"]
    strings = [text[1:-1] for kind, text in tokens if kind == "string"]
    after = pairwise(tokens)
    fields = [text for (_, before), (kind, text) in after if before == "." and kind == "name"]
    texts = [form for text in (*data, *strings) for form in (text, text.strip())]
    return _TemplateTexts(texts, frozenset([*strings, *fields]), frozenset(_removed_texts(tokens)))


def _removed_texts(tokens: Sequence[tuple[str, str]]) -> Iterator[str]:
    code = [(kind, text) for kind, text in tokens if kind != "whitespace"]
    joins = ("name", "join") in code
    calls = {"replace", "split"} if joins else {"replace"}
    for (_, name), (_, bracket), (kind, text) in zip(code, code[1:], code[2:], strict=False):
        if name in calls and bracket == "(" and kind == "string":
            value = text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
            if value:
                yield value


SPACE_SIGN = "▁"
UNKNOWN = "\U0010fffd"
CHANGES_CASE = re.compile("lower|upper|title|capitalize|swapcase")
"""Filters and methods in a template that can turn other text into a control token."""
HTML_TAG = re.compile(
    "</?(?:h[1-6]|[bius]|em|strong|su[bp]|code|blockquote|table|caption|t(?:[rhd]|head|body|foot))>"
)


def is_vocabulary(token: Any, template: str) -> bool:
    """Whether an added token (`tokenizers.AddedToken`) is text: a word, white space, one sign, or
    an HTML tag that the template neither opens nor closes."""
    shown = token.content.replace(SPACE_SIGN, " ").strip()
    pair = (shown.replace("</", "<"), shown.replace("</", "<").replace("<", "</"))
    tag = HTML_TAG.fullmatch(shown) is not None and not any(text in template for text in pair)
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
        self.normalized = frozenset(i for i in self.content if added[i].normalized)
        for text in reserved:
            token = fast.token_to_id(text)
            if token is not None:
                self.content.setdefault(token, text)
        self.vocabulary = [token for i, token in added.items() if i not in self.content]
        self.texts = sorted({*self.content.values(), *reserved} - {""})
        flags = re.IGNORECASE if template is None or CHANGES_CASE.search(template) else re.NOFLAG
        self._find = re.compile(pattern_of(self.texts), flags)
        self._find_all = re.compile(f"(?={self._find.pattern})", flags)
        self._longest = max(map(len, self.texts), default=1)
        self._edges = Edges(self.texts, template)
        self.reachable = _reachable(fast, self.content, self.normalized)
        """Whether text without a literal control token may still encode to the id of one."""
        self._normalizer = fast.normalizer

    def touched(self, text: str) -> bool:
        """Whether `text` holds a control token, or a part of one that a template may complete."""
        within = starts(self._find, text, self._longest)
        return next(within, None) is not None or next(self._edges.of(text), None) is not None

    def breaks(self, text: str) -> array[int]:
        """Ascending indices of characters to hide so that `text` gives no control token, alone or
        within a template. A text of megabytes may consist only of them."""
        places = array("Q", starts(self._find_all, text, self._longest))
        for place in self._edges.of(text):
            at = bisect_left(places, place)
            if places[at : at + 1] != array("Q", [place]):
                places.insert(at, place)
        return places

    def keeps(self, mark: str) -> bool:
        return self._normalizer is None or mark in self._normalizer.normalize_str(mark)


def pattern_of(texts: Sequence[str]) -> str:
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


def _reachable(fast: Any, content: Mapping[int, str], normalized: frozenset[int]) -> bool:
    changes = fast.normalizer is not None or any(SPACE_SIGN in text for text in content.values())
    in_model = partial(fast.model.token_to_id)
    return changes and (bool(normalized) or any(in_model(t) is not None for t in content.values()))
