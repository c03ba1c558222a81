"""Tokens to text, one at a time, for one row."""

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers.decoders import DecodeStream

from ..records import Tokenizer


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """From each character of a byte-level vocabulary to its byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (x for x in range(256) if x not in printable)
    return {chr(x): x for x in printable} | {chr(256 + n): x for n, x in enumerate(others)}


def special_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids of the added tokens that are special."""
    added: dict[int, Any] = tokenizer.fast.get_added_tokens_decoder()
    return frozenset(token for token, entry in added.items() if entry.special)


def marker_tokens(tokenizer: Tokenizer, markers: Sequence[str]) -> frozenset[int]:
    """Ids of special tokens that a parser must see to find `markers`: a marker, or part of one."""
    added: dict[int, Any] = tokenizer.fast.get_added_tokens_decoder()
    special = special_tokens(tokenizer)
    return frozenset(i for i in special if any(added[i].content in marker for marker in markers))


def _is_byte_level(fast: Any) -> bool:
    """Whether each token stands for bytes. Also true for a wrongly converted tokenizer: a
    byte-level vocabulary with a SentencePiece decoder, on which `decode` would show `Ġ` and `Ċ`."""
    state = fast.decoder.__getstate__().decode() if fast.decoder is not None else ""
    if '"ByteLevel"' in state and '"Sequence"' not in state:
        return True
    line_end = fast.token_to_id("Ċ")
    if line_end is None or fast.token_to_id("▁") is not None:
        return False
    return bool(fast.decode([line_end], skip_special_tokens=False) == "Ċ")


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for, perhaps only a part of a character."""
    data = Detokenizer(tokenizer).bytes_of(token)
    return tokenizer.decode([token], skip_special=False).encode() if data is None else data


class Detokenizer:
    """Text of a growing token list. No piece ends inside a character. `visible`: special tokens
    that become text; others do not. `tokenizers.DecodeStream` (0.22) raises on an invalid byte
    after valid ones, so this class joins bytes itself."""

    def __init__(self, tokenizer: Tokenizer, *, visible: frozenset[int] = frozenset()) -> None:
        self._fast: Any = tokenizer.fast
        self._hidden = special_tokens(tokenizer) - visible
        self._added: dict[int, Any] = self._fast.get_added_tokens_decoder()
        self._byte_level = _is_byte_level(self._fast)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        """The last tokens, because vocabularies drop the space at the beginning of a text."""
        self._pending: list[int] = []
        self._stream: DecodeStream | None = None

    @property
    def pending(self) -> bool:
        """Whether tokens or bytes wait for the rest of a character."""
        return bool(self._pending) or bool(self._bytes.getstate()[0])

    def push(self, token: int) -> str:
        """The text that is complete with this token; it may be empty."""
        if token in self._hidden:
            return ""
        data = self.bytes_of(token)
        if data is None:
            return self._flush_bytes() + self._push_text(token)
        text = self._flush_text()
        if data and not self._byte_level:
            # Behind a byte, the first space of the next token is part of the text.
            letter = self._fast.token_to_id("<0x41>")
            self._context, self._stream = [token if letter is None else letter], None
        return text + self._bytes.decode(data)

    def finish(self) -> str:
        """The text of what is pending. Incomplete characters become U+FFFD."""
        return self._flush_bytes() + self._flush_text()

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that the token stands for. `None`: the tokenizer must decode it as text."""
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            if token in self._added:
                return str(self._added[token].content).encode()
            table = byte_of_character()
            return bytes(table[x] for x in piece if x in table)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return None

    def _push_text(self, token: int) -> str:
        if self._stream is None:
            self._stream = DecodeStream(ids=self._context, skip_special_tokens=False)
        text = self._stream.step(self._fast, token)
        if text is None:
            self._pending.append(token)
            return ""
        self._context = [*self._context, *self._pending, token][-4:]
        self._pending.clear()
        return str(text)

    def _flush_bytes(self) -> str:
        return self._bytes.decode(b"", final=True)

    def _flush_text(self) -> str:
        if not self._pending:
            return ""
        before = self._fast.decode(self._context, skip_special_tokens=False)
        ids = [*self._context, *self._pending]
        text: str = self._fast.decode(ids, skip_special_tokens=False)
        self._context, self._stream = ids[-4:], None
        self._pending.clear()
        return text.removeprefix(before)
