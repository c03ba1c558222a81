"""Which texts a tokenizer reads as control tokens, and where a client's text holds one.

Every added token is one, special or not, but for words and white space, which some tokenizers
keep there as plain vocabulary (CodeGen's runs of spaces, DeepSeek-Coder's letters). transformers
5.23 has `sanitize_control_tokens` for those that are special or stand in the template; keys of
mappings, checkpoints at message ends and texts that the template joins are beyond it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jinja2

SPACE_SIGN = "▁"
"""SentencePiece's sign for a space."""
UNKNOWN = "\U0010fffd"
"""A character that no vocabulary has."""


def is_vocabulary(token: Any) -> bool:
    """Whether an added token (`tokenizers.AddedToken`) is a word, white space or one sign."""
    shown = token.content.replace(SPACE_SIGN, " ").strip()
    return not token.special and (len(shown) < 2 or shown.isalnum())


class ControlTokens:
    """The control tokens of a tokenizer (`tokenizers.Tokenizer`) under a chat template.

    `reserved`: further texts that stand for something else than themselves (media).
    `template`: the chat template's source; `None`: it is not known.
    """

    def __init__(
        self, fast: Any, template: str | None = None, reserved: Sequence[str] = ()
    ) -> None:
        added: dict[int, Any] = fast.get_added_tokens_decoder()
        self.content = {i: t.content for i, t in added.items() if not is_vocabulary(t)}
        self.normalized = frozenset(i for i in self.content if added[i].normalized)
        self.vocabulary = [token for i, token in added.items() if i not in self.content]
        for text in reserved:
            token = fast.token_to_id(text)
            if token is not None:
                self.content.setdefault(token, text)
        self.texts = sorted({*self.content.values(), *reserved} - {""})
        self._find = re.compile(pattern_of(self.texts))
        self._find_all = re.compile(f"(?={self._find.pattern})")
        self._edges = _Edges(self.texts, template)
        self.reachable = _reachable(fast, self.content, self.normalized)
        """Text that does not hold a control token as it stands may still give one's id."""
        self._normalizer = fast.normalizer

    def touched(self, text: str) -> bool:
        """Whether `text` holds a control token, or a part of one that a template may complete."""
        return self._find.search(text) is not None or any(self._edges.of(text))

    def breaks(self, text: str) -> set[int]:
        """Characters without which `text` gives no control token, alone or within a template."""
        return {match.start() for match in self._find_all.finditer(text)} | {*self._edges.of(text)}

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


class _Edges:
    """Where a string ends or begins within a control token that its neighbours complete.

    A template joins the parts of a message, and may put names between signs (`<` name `>`).
    """

    def __init__(self, texts: Sequence[str], template: str | None) -> None:
        self._texts = texts
        self._mirrored = sorted(text[::-1] for text in texts)
        self._reach = max(map(len, texts), default=1) - 1
        self._first = any_of({text[0] for text in texts})
        self._last = any_of({text[-1] for text in texts})
        literals = None if template is None else _literals(template)
        opens: Callable[[str], bool] = _is_sign
        closes: Callable[[str], bool] = _is_sign
        if literals is not None:
            opens = {*self._parts(literals, texts, from_end=True)}.__contains__
            closes = {*self._parts(literals, self._mirrored, from_end=False)}.__contains__
        self._opened = any(opens(text[:n]) for text in texts for n in range(1, len(text)))
        self._completions = {*_completions(texts, opens, closes)}

    def of(self, text: str) -> Iterator[int]:
        """Indices of the characters to take out."""
        core = text.rstrip()
        if core and self._is_begun(core):
            yield len(core) - 1
        if core and self._opened:
            start = len(core) - len(core.lstrip())
            core = core[start:]
            if core in self._completions or self._is_ended(core):
                yield start

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
        """Ends of literals that begin one of the texts, or beginnings that end one."""
        for literal in literals:
            for n in range(1, min(self._reach, len(literal)) + 1):
                part = literal[-n:] if from_end else literal[:n]
                if _begins(texts, part if from_end else part[::-1]):
                    yield part


def _begins(texts: Sequence[str], part: str) -> bool:
    """Whether one of the sorted texts begins with `part`."""
    at = bisect_left(texts, part)
    return at < len(texts) and texts[at].startswith(part)


def any_of(letters: Iterable[str]) -> re.Pattern[str]:
    """Matches any one of some characters."""
    return re.compile("|".join(map(re.escape, sorted(letters))) or "(?!)")


def _is_sign(part: str) -> bool:
    return not any(map(str.isalnum, part))


def _completions(
    texts: Iterable[str], opens: Callable[[str], bool], closes: Callable[[str], bool]
) -> Iterator[str]:
    """What makes a control token between an opening and a closing part of it."""
    for text in texts:
        starts = [n for n in range(1, len(text)) if opens(text[:n])]
        ends = [n for n in range(2, len(text)) if closes(text[n:])] if starts else []
        yield from (text[start:end] for start in starts for end in ends if start < end)


def _literals(template: str) -> list[str] | None:
    """The texts that a template writes, trimmed as it may be; `None`: it cannot be read."""
    try:
        tokens = list(jinja2.Environment(autoescape=False).lex(template))  # noqa: S701
    except jinja2.TemplateSyntaxError:
        return None
    texts = [text if kind == "data" else text[1:-1] for _, kind, text in tokens if kind in _TEXTS]
    return [each for text in texts for each in (text, text.strip())]


_TEXTS = ("data", "string")


def _reachable(fast: Any, content: Mapping[int, str], normalized: frozenset[int]) -> bool:
    changes = fast.normalizer is not None or any(SPACE_SIGN in text for text in content.values())
    in_model = partial(fast.model.token_to_id)
    return changes and (bool(normalized) or any(in_model(t) is not None for t in content.values()))
