"""Which texts a tokenizer reads as control tokens, and where a client's text holds one.

Every added token is one, special or not, but for what some tokenizers keep there as plain
vocabulary: white space, letters, tags of HTML.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..sliced import starts
from .joins import Edges

SPACE_SIGN = "▁"
"""SentencePiece's sign for a space."""
UNKNOWN = "\U0010fffd"
"""A character that no vocabulary has."""
CHANGES_CASE = re.compile("lower|upper|title|capitalize|swapcase")
"""In a template: filters and methods that make a control token of a text that was none."""
HTML_TAG = re.compile(
    "</?(?:h[1-6]|[bius]|em|strong|su[bp]|code|blockquote|table|caption|t(?:[rhd]|head|body|foot))>"
)


def is_vocabulary(token: Any, template: str) -> bool:
    """Whether an added token (`tokenizers.AddedToken`) is text: a word, white space, one sign,
    or a tag of HTML that the template neither opens nor closes."""
    shown = token.content.replace(SPACE_SIGN, " ").strip()
    pair = (shown.replace("</", "<"), shown.replace("</", "<").replace("<", "</"))
    tag = HTML_TAG.fullmatch(shown) is not None and not any(each in template for each in pair)
    return not token.special and (tag or len(shown) < 2 or shown.isalnum())


class ControlTokens:
    """The control tokens of a tokenizer (`tokenizers.Tokenizer`) under a chat template.

    `reserved`: further texts that stand for something else than themselves (media).
    `template`: the chat template's source; `None`: it is not known.
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
        """Text that does not hold a control token as it stands may still give one's id."""
        self._normalizer = fast.normalizer

    def touched(self, text: str) -> bool:
        """Whether `text` holds a control token, or a part of one that a template may complete."""
        within = starts(self._find, text, self._longest)
        return next(within, None) is not None or next(self._edges.of(text), None) is not None

    def breaks(self, text: str) -> array[int]:
        """Characters without which `text` gives no control token, alone or within a template.

        Their indices, ascending; a text of megabytes may be nothing else.
        """
        places = array("Q", starts(self._find_all, text, self._longest))
        for place in self._edges.of(text):
            at = bisect_left(places, place)
            if places[at : at + 1] != array("Q", [place]):
                places.insert(at, place)
        return places

    def keeps(self, mark: str) -> bool:
        """Whether the tokenizer's normalizer leaves a character as it is."""
        return self._normalizer is None or mark in self._normalizer.normalize_str(mark)


def pattern_of(texts: Sequence[str]) -> str:
    """A regular expression for the longest of `texts`; common beginnings are compared once."""
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
