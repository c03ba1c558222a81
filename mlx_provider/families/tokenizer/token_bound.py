"""A lower limit for the tokens of a text, without encoding it. Valid for tokenizers 0.23."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import pre_tokenizers

COMPOSED = 4
"""Most characters that NFC or NFKC composes into one: the longest canonical decomposition of a
character."""
SHORTENS_NOTHING = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
"""Normalisers that make at least one character of each character."""
KEEPS_ALL = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")


def characters_per_token(fast: Any) -> int | None:
    """The most characters of a text, also beyond ASCII, for one token. `None`: unlimited or
    unknown, because characters are dropped, squeezed, or joined into one unknown token. `fast`: a
    `tokenizers.Tokenizer`."""
    normaliser, words = _state(fast.normalizer), _state(fast.pre_tokenizer)
    shrinks = _shrinks(normaliser)
    added = fast.get_added_tokens_decoder().values()
    stripping = any(token.lstrip or token.rstrip for token in added)
    if shrinks is None or stripping or not _keeps_all(words) or not _covers_all(fast):
        return None
    contents = [token.content for token in added]
    if fast.normalizer is not None:
        contents += [fast.normalizer.normalize_str(content) for content in contents]
    return shrinks * max(map(len, [*fast.get_vocab(with_added_tokens=False), *contents]))


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else dict(json.loads(part.__getstate__()))


def _shrinks(normaliser: dict[str, Any] | None) -> int | None:
    """Most characters that become one. `None`: unknown."""
    if normaliser is None:
        return 1
    kind = normaliser["type"]
    if kind == "Sequence":
        factor = 1
        for part in map(_shrinks, normaliser["normalizers"]):
            if part is None:
                return None
            factor *= part
        return factor
    if kind == "Replace":
        text, content = normaliser["pattern"].get("String"), normaliser["content"]
        return 1 if text is not None and len(content) >= len(text) else None
    if kind in ("NFC", "NFKC"):
        return COMPOSED
    return 1 if kind in SHORTENS_NOTHING else None


def _keeps_all(words: dict[str, Any] | None) -> bool:
    if words is None:
        return True
    if words["type"] == "Sequence":
        return all(map(_keeps_all, words["pretokenizers"]))
    if words["type"] in ("Split", "Punctuation"):
        return bool(words["behavior"] != "Removed")
    return words["type"] in KEEPS_ALL


def _covers_all(fast: Any) -> bool:
    """Whether every character becomes part of a token, and each unknown one a separate token."""
    model = fast.model
    if type(model).__name__ != "BPE":
        return False
    known: Callable[[str], int | None] = fast.token_to_id
    if model.unk_token is not None and not model.fuse_unk:
        return True
    if model.byte_fallback:
        return None not in (known(f"<0x{byte:02X}>") for byte in range(256))
    parts = f"{_state(fast.normalizer)} {_state(fast.pre_tokenizer)}"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return "'ByteLevel'" in parts and None not in map(known, alphabet)
