"""A model's vocabulary for llguidance."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def grammar_tokenizer(fast: Any, eos: Iterable[int], rows: int) -> LLTokenizer:
    """The vocabulary of `fast`, a `tokenizers.Tokenizer`. `rows`: rows of the output matrix.
    Special tokens, and added tokens in angle brackets, are not text: a grammar must name them (as
    in llguidance 1.9.1). Raises `ValueError` for a tokenizer that llguidance does not support."""
    from llguidance import LLTokenizer

    # llguidance refuses fewer rows than the tokenizer has entries.
    rows = max(rows, max(fast.get_vocab(with_added_tokens=True).values(), default=0) + 1)
    ends = sorted(token for token in eos if token < rows)
    added, text = fast.get_added_tokens_decoder(), fast.to_str()
    texts = [token for token in ends if token in added and not is_marker(added[token])]
    if texts or fast.truncation is not None or fast.padding is not None:
        whole = json.loads(text) | {"truncation": None, "padding": None}
        for token in whole["added_tokens"]:
            token["special"] |= token["id"] in texts
        text = json.dumps(whole, ensure_ascii=False)
    # Building the slices (cheap masks of JSON strings) is a separate step: llguidance holds the GIL
    # in each step.
    plain = LLTokenizer(text, n_vocab=rows, eos_token=ends or None, slices=[])
    return plain.with_slices(LLTokenizer.general_slices())


def is_marker(token: Any) -> bool:
    """Whether an added token is not text: a grammar must name it."""
    content: str = token.content
    return token.special or (content[:1] == "<" and content[-1:] == ">")
