"""The texts that a tokenizer reads as control tokens, and their positions in a client's text.

Every added token is a control token, special or not, except plain vocabulary that some tokenizers
add: white space, letters, HTML tags. A template can complete a part of one. It joins the parts of a
message, may put a name between signs (`<` name `>`), and may remove a mode switch (`/think`), which
joins the text around it."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain, groupby, pairwise
from typing import Any

import jinja2

SLICE = 2**18
"""Characters that are searched in a few milliseconds, in which `re` blocks all other threads."""


def match_starts(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[int]:
    """Ascending start positions of matches, for a pattern that reads at most `longest` characters.
    Whether there is a match is exact. All positions are exact only for lookaheads: other matches
    may cross the end of a slice and overlap the first match of the next slice."""
    for begin in range(0, len(text), SLICE):
        end = begin + SLICE
        for match in pattern.finditer(text, begin, end + longest - 1):
            if match.start() < end:
                yield match.start()


class Edges:
    """Finds parts of control tokens that a template may complete: if a client writes `im_end|>`
    and the template writes `<|` directly before it, position 0 is an edge.

    `texts`: the control tokens. `flags`: of a search for them. `template`: its source, if known."""

    def __init__(self, texts: Sequence[str], template: str | None, flags: re.RegexFlag) -> None:
        fold = self._fold = _fold_case if flags & re.IGNORECASE else str
        self._texts = sorted(map(fold, texts))
        self._reversed = sorted(text[::-1] for text in self._texts)
        self._initial = re.compile(pattern_of({text[0] for text in self._texts}))
        self._final = re.compile(pattern_of({text[-1] for text in self._texts}))
        self._longest_part = max(1, max(map(len, texts), default=0) - 1)
        written = _read_template(template)
        self._removed = re.compile(pattern_of(written.removed), flags)
        self._longest_removed = max(map(len, written.removed), default=1)
        either = f"{self._removed.pattern}|({self._initial.pattern})"
        self._removed_or_initial = re.compile(either, flags)
        # whether the template may write a part directly before, or after, a text of the client
        opens: Callable[[str], bool] = _is_sign
        closes: Callable[[str], bool] = _is_sign
        if written.texts is not None:
            literals, lengths = [*map(fold, written.texts)], range(1, self._longest_part + 1)
            opens = {literal[-n:] for literal in literals for n in lengths}.__contains__
            closes = {literal[:n] for literal in literals for n in lengths}.__contains__
        self._may_open = any(opens(text[:n]) for text in self._texts for n in range(1, len(text)))
        self._middles = {*_middles(self._texts, opens, closes)} - {*map(fold, written.names)}

    def find(self, text: str) -> Iterator[int]:
        """One position in each such part. The template may trim white space around `text`."""
        if next(match_starts(self._removed, text, self._longest_removed), None) is not None:
            # text around a removed one may join, so that any first letter may begin a token
            found = self._removed_or_initial.finditer(text)
            yield from (match.start() for match in found if match[1])
        core = text.rstrip()
        if _ends_within(self._fold(core[-self._longest_part :]), self._texts, self._initial):
            yield len(core) - 1  # the last character: every token that begins in `core` has it
        if self._may_open:
            start = len(core) - len(core.lstrip())
            window = self._fold(core[start : start + self._longest_part])
            if window in self._middles or _ends_within(window[::-1], self._reversed, self._final):
                yield start  # the first: every token that ends in `core` has it


def _fold_case(text: str) -> str:
    """Without differences of case, in equally many characters."""
    folded = text.upper().casefold()
    if len(folded) == len(text):
        return folded
    forms = ((char.upper().casefold(), char.lower(), char) for char in text)
    return "".join(next(form for form in each if len(form) == 1) for each in forms)


def _ends_within(window: str, texts: Sequence[str], first: re.Pattern[str]) -> bool:
    """Whether `window` ends inside one of the sorted `texts`, whose first letters match `first`."""
    for match in first.finditer(window):
        part = window[match.start() :]
        at = bisect_right(texts, part)
        if at < len(texts) and texts[at].startswith(part):
            return True
    return False


def _is_sign(part: str) -> bool:
    """Whether `part` has no letter or digit: an unknown template may write it around a name."""
    return not any(map(str.isalnum, part))


def _middles(
    texts: Iterable[str], opens: Callable[[str], bool], closes: Callable[[str], bool]
) -> Iterator[str]:
    """Parts of tokens, where the template may write both the beginning and the end of the token."""
    for text in texts:
        starts = [n for n in range(1, len(text)) if opens(text[:n])]
        ends = [n for n in range(2, len(text)) if closes(text[n:])] if starts else []
        yield from (text[start:end] for start in starts for end in ends if start < end)


@dataclass(frozen=True)
class _TemplateTexts:
    texts: list[str] | None = None
    """What a template writes: each text, also without white space around it. `None`: unknown."""
    names: frozenset[str] = frozenset()
    """Names that it looks up or compares. A client's text that is one of these is no edge."""
    removed: frozenset[str] = frozenset()
    """Texts that it replaces, or at which it splits a text to join it again."""


def _read_template(template: str | None) -> _TemplateTexts:
    if template is None:
        return _TemplateTexts()
    try:
        tokens = [(kind, text) for _, kind, text in jinja2.Environment().lex(template)]  # noqa: S701
    except jinja2.TemplateSyntaxError:
        return _TemplateTexts()
    data = [text for kind, text in tokens if kind == "data"]
    strings = [text[1:-1] for kind, text in tokens if kind == "string"]
    pairs = pairwise(tokens)
    fields = [text for (_, before), (kind, text) in pairs if before == "." and kind == "name"]
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
CHANGES_CASE = re.compile("lower|upper|title|capitalize|swapcase")
"""Filters and methods in a template that can turn other text into a control token."""
LIGATURE = re.compile("[ßﬀ-ﬆ]")
"""Letters that become several ones in upper case."""
HTML_TAG = re.compile(
    "</?(?:h[1-6]|[bius]|em|strong|su[bp]|code|blockquote|table|caption|t(?:[rhd]|head|body|foot))>"
)


def is_vocabulary(token: Any, template: str) -> bool:
    """Whether an added token (`tokenizers.AddedToken`) is text: a word, white space, one
    character, or an HTML tag that the template neither opens nor closes."""
    shown = token.content.replace(SPACE_SIGN, " ").strip()
    opening = shown.replace("</", "<")
    in_template = opening in template or opening.replace("<", "</") in template
    tag = HTML_TAG.fullmatch(shown) is not None and not in_template
    return not token.special and (tag or len(shown) < 2 or shown.isalnum())


class ControlTokens:
    """The control tokens of a tokenizer (`tokenizers.Tokenizer`) with a chat template.

    `reserved`: further texts with a special meaning (media). `template`: the chat template's
    source; `None`: unknown."""

    def __init__(
        self, fast: Any, template: str | None = None, reserved: Sequence[str] = ()
    ) -> None:
        added: dict[int, Any] = fast.get_added_tokens_decoder()
        source = template or ""
        self.content = {i: t.content for i, t in added.items() if not is_vocabulary(t, source)}
        """Texts by token id."""
        self.normalized = frozenset(i for i in self.content if added[i].normalized)
        """Ids of those that are found only after normalising."""
        for text in reserved:
            if (token_id := fast.token_to_id(text)) is not None:
                self.content.setdefault(token_id, text)
        self.vocabulary = [token for i, token in added.items() if i not in self.content]
        """The other added tokens."""
        self.texts = sorted({*self.content.values(), *reserved} - {""})
        """All texts that no client may produce."""
        flags = re.IGNORECASE if template is None or CHANGES_CASE.search(template) else re.NOFLAG
        self._find = re.compile(pattern_of(self.texts), flags)
        self._find_all = re.compile(f"(?={self._find.pattern})", flags)
        self._longest = max(map(len, self.texts), default=1)
        self._edges = Edges(self.texts, template, flags)
        self.reachable = _reachable(fast, self.content, self.normalized)
        """Whether text without a literal control token may still encode to the id of one."""
        self._normalizer = fast.normalizer

    def touched(self, text: str) -> bool:
        """Whether `text` holds a control token, or a part of one that a template may complete."""
        within = match_starts(self._find, text, self._longest)
        return next(chain(within, self._edges.find(text), self._ligatures(text)), None) is not None

    def breaks(self, text: str) -> array[int]:
        """Ascending indices of characters to hide so that `text` gives no control token, alone or
        within a template. A text of megabytes may consist only of them."""
        found = merge(match_starts(self._find_all, text, self._longest), self._ligatures(text))
        places = array("Q", (place for place, _ in groupby(found)))
        for place in self._edges.find(text):
            at = bisect_left(places, place)
            if places[at : at + 1] != array("Q", [place]):
                places.insert(at, place)
        return places

    def _ligatures(self, text: str) -> Iterator[int]:
        """Ascending positions, if a template's upper case can make a control token of them."""
        found = match_starts(LIGATURE, text, 1)
        first = next(found, None) if self._find.flags & re.IGNORECASE else None
        if first is not None and self.touched(text.upper()):
            yield from chain([first], found)

    def keeps(self, mark: str) -> bool:
        """Whether the tokenizer's normaliser leaves this character in a text."""
        return self._normalizer is None or mark in self._normalizer.normalize_str(mark)


def pattern_of(texts: Iterable[str]) -> str:
    """A regex for the longest of `texts` at a position. Common prefixes are compared once."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _expression(tree) or "(?!)"


def _expression(node: Mapping[str, Any]) -> str:
    """`node`: letter -> node of the next letters. The letter "": a text ends here."""
    branches = [re.escape(c) + _expression(rest) for c, rest in node.items() if c]
    joined = "|".join(branches)
    if len(branches) > 1 or (branches and "" in node):
        joined = f"(?:{joined})"
    return joined + "?" * bool(branches and "" in node)


def _reachable(fast: Any, content: Mapping[int, str], normalized: frozenset[int]) -> bool:
    """After a normaliser, or as SentencePiece writes spaces, other text can equal a token that is
    found after normalising, or that is in the model's own vocabulary."""
    if fast.normalizer is None and not any(SPACE_SIGN in text for text in content.values()):
        return False
    return bool(normalized) or any(fast.model.token_to_id(t) is not None for t in content.values())
