"""Finds the texts that a tokenizer reads as control tokens, and their positions in a client's text.

Every added token counts, special or not, except plain vocabulary that some tokenizers store there:
white space, letters, HTML tags.
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
