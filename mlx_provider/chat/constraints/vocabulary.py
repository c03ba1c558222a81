"""A model's vocabulary for llguidance: the bytes of each token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...upstream.detokenizer import byte_of_character

if TYPE_CHECKING:
    from llguidance import LLTokenizer

SPACE = "▁"


def grammar_tokenizer(fast: Any, eos: Iterable[int], rows: int) -> LLTokenizer:
    """The vocabulary of `fast`, a `tokenizers.Tokenizer`. `rows`: rows of the output matrix.
    Special tokens, and added tokens in angle brackets, are not text: a grammar must name them (as
    in llguidance 1.9.1). A tokenizer with an unknown decoder goes to llguidance as JSON, at several
    times the cost. Raises `ValueError` if llguidance does not support the tokenizer."""
    from llguidance import LLTokenizer, TokenizerWrapper

    vocab: dict[str, int] = fast.get_vocab(with_added_tokens=True)
    # llguidance refuses fewer rows than the tokenizer has entries.
    rows = max(rows, max(vocab.values(), default=0) + 1)
    ends = sorted(token for token in eos if token < rows)
    spelled = _bytes_of_pieces(fast)
    if spelled is None or not ends:
        return LLTokenizer(_as_json(fast), n_vocab=rows, eos_token=ends or None)
    tokens = [b""] * rows
    for piece, number in vocab.items():
        tokens[number] = spelled(piece)
    special = set(ends)
    for number, token in fast.get_added_tokens_decoder().items():
        if is_marker(token):
            special.add(number)
        # an added token is written as it is, but SentencePiece also writes its spaces as `SPACE`
        tokens[number] = spelled(token.content) if spelled is _fallback else token.content.encode()
    vocabulary = _Vocabulary(fast, tokens, sorted(special), ends[0])
    # Building the slices (cheap masks of JSON strings) is a separate step: llguidance holds the GIL
    # in each step.
    plain = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=ends, slices=[])
    return plain.with_slices(LLTokenizer.general_slices())


def is_marker(token: Any) -> bool:
    """Whether an added token is not text: a grammar must name it."""
    content: str = token.content
    return token.special or (content[:1] == "<" and content[-1:] == ">")


@dataclass(frozen=True)
class _Vocabulary:  # what `llguidance.TokenizerWrapper` reads
    fast: Any
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: bytes | str) -> list[int]:
        whole = text if isinstance(text, str) else text.decode()
        found: list[int] = self.fast.encode(whole, add_special_tokens=False).ids
        return found


def _bytes_of_pieces(fast: Any) -> Callable[[str], bytes] | None:
    """A function from a piece to its bytes; `None`: unknown. Known are the byte-level decoder of
    GPT-2, and SentencePiece's without a space added before a text."""
    if fast.truncation is not None or fast.padding is not None or fast.decoder is None:
        return None
    decoder = json.loads(fast.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return _byte_level
    parts = [part["type"] for part in decoder.get("decoders", ())]
    around = [part.__getstate__() for part in (fast.normalizer, fast.pre_tokenizer) if part]
    prefixed = any(word in state for state in around for word in (b"Prepend", b"Metaspace"))
    if parts == ["Replace", "ByteFallback", "Fuse"] and not prefixed:
        return _fallback
    return None


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(byte_of_character().__getitem__, piece))
    except KeyError:
        return piece.encode()


def _fallback(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    return piece.replace(SPACE, " ").encode()


def _as_json(fast: Any) -> str:
    text: str = fast.to_str()
    if fast.truncation is None and fast.padding is None:
        return text
    return json.dumps(json.loads(text) | {"truncation": None, "padding": None})
