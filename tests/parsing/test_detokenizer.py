"""Tokens to text: bytes, special tokens, and vocabularies that drop spaces."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from mlx_provider.chat.output.reply import Reply
from mlx_provider.upstream.detokenizer import (
    Detokenizer,
    byte_of_character,
    marker_tokens,
    special_tokens,
)

DATA = Path(__file__).parents[1] / "data" / "parsing" / "detok.jsonl"
CASES = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


@dataclass
class Plain:
    """What a detokenizer needs of a model's tokenizer."""

    fast: Any

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(self.fast.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self.fast.decode(list(tokens), skip_special_tokens=skip_special))


def byte_level(pieces: Iterable[bytes], special: Sequence[str] = ()) -> Plain:
    """A byte-level vocabulary; token n is the n-th piece, special ones follow."""
    character = {byte: shown for shown, byte in byte_of_character().items()}
    vocabulary: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        shown = "".join(character[byte] for byte in piece)
        vocabulary[shown if shown not in vocabulary else f"{shown}\0{number}"] = number
    fast = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True) for text in special])
    return Plain(fast)


PIECES = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


def sentencepiece(words: Sequence[str] = ("▁a", "a", "▁", "b", "▁b")) -> Plain:
    """A SentencePiece vocabulary with byte fallback; `<0x00>` is token len(words) + 1."""
    vocabulary = {"<unk>": 0} | {word: n + 1 for n, word in enumerate(words)}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(words) + 1 + byte
    model = models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    fast = FastTokenizer(model)
    fast.decoder = PIECES
    return Plain(fast)


def read(tokenizer: Any, tokens: Iterable[int], **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*map(detokenizer.push, tokens), detokenizer.finish()]


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["kind"] == kind]


def pieces_of(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(piece) for piece in case["token_bytes_hex"]]


def tokens_of(case: dict[str, Any]) -> tuple[Any, list[int]]:
    pieces = pieces_of(case)
    known = list(dict.fromkeys(pieces))
    return byte_level(known), [known.index(piece) for piece in pieces]


@pytest.mark.parametrize("case", of_kind("valid_utf8"))
def test_valid_utf8_is_decoded_to_its_text(case: dict[str, Any]) -> None:
    assert "".join(read(*tokens_of(case))) == case["expected"]["text"]


@pytest.mark.parametrize("case", of_kind("invalid_utf8"))
def test_invalid_utf8_becomes_replacement_characters(case: dict[str, Any]) -> None:
    assert "".join(read(*tokens_of(case))) == case["expected"]["text_replace"]


@pytest.mark.parametrize("case", of_kind("stop_string_across_tokens"))
def test_a_stop_string_across_tokens_ends_the_reply(case: dict[str, Any]) -> None:
    tokenizer, tokens = tokens_of(case)
    reply = Reply(Detokenizer(tokenizer), stops=case["stop"])
    deltas = [delta for token in tokens for delta in reply.push(token)]
    last, reason = reply.finish("stop")
    assert "".join(delta.content for delta in deltas + last) == case["expected"]["text"]
    assert reply.stopped
    assert reason == case["expected"]["finish_reason"]


@pytest.mark.parametrize("case", of_kind("byte_level_vocab_with_sentencepiece_decoder"))
def test_a_vocabulary_with_the_wrong_decoder_still_gives_the_text(case: dict[str, Any]) -> None:
    marked = [word for word in case["vocab"] if word.startswith("<")]
    fast = FastTokenizer(models.BPE(vocab=case["vocab"], merges=[]))
    fast.add_tokens([AddedToken(word, special=False) for word in marked])
    fast.decoder = PIECES
    text = "".join(read(Plain(fast), case["token_ids"]))
    assert text == case["expected"]["text"]
    assert not set(case["expected"]["forbidden_chars"]) & set(text)


@given(data=st.binary(max_size=24), sizes=st.lists(st.integers(1, 4), max_size=24))
def test_any_bytes_are_decoded_as_by_python(data: bytes, sizes: list[int]) -> None:
    pieces, at = [], 0
    for size in [*sizes, *([1] * len(data))]:
        pieces.append(data[at : at + size])
        at += size
    known = list(dict.fromkeys(piece for piece in pieces if piece))
    texts = read(byte_level(known), [known.index(piece) for piece in pieces if piece])
    assert "".join(texts) == data.decode("utf-8", "replace")


@given(data=st.binary(max_size=24))
def test_byte_fallback_reads_any_bytes(data: bytes) -> None:
    """`tokenizers.DecodeStream` raises on some of these."""
    tokenizer = sentencepiece()
    texts = read(tokenizer, [6 + byte for byte in data])
    assert "".join(texts) == data.decode("utf-8", "replace")


@given(words=st.lists(st.sampled_from([1, 2, 4, 5, "é", "😀"]), max_size=12))
def test_words_and_byte_tokens_are_decoded_as_by_the_tokenizer(words: list[int | str]) -> None:
    tokenizer = sentencepiece()
    tokens = [
        token
        for word in words
        for token in ([word] if isinstance(word, int) else [6 + b for b in word.encode()])
    ]
    assert "".join(read(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_all_words_but_the_first_keep_their_space() -> None:
    assert "".join(read(sentencepiece(), [1, 5])) == "a b"


def test_special_tokens_are_hidden_unless_they_are_markers() -> None:
    tokenizer = byte_level([b"a", b"b"], special=["<|call|>", "<|end|>"])
    assert special_tokens(tokenizer) == {2, 3}
    assert "".join(read(tokenizer, [0, 2, 1, 3])) == "ab"
    visible = marker_tokens(tokenizer, ["<|call|>"])
    assert visible == {2}
    assert "".join(read(tokenizer, [0, 2, 1, 3], visible=visible)) == "a<|call|>b"


def test_the_tokens_of_a_marker_of_several_special_tokens_are_visible() -> None:
    tokenizer = byte_level([b"a"], special=["<|start|>", "<|plugin|>"])
    assert marker_tokens(tokenizer, ["<|start|><|plugin|>"]) == {1, 2}


def test_an_added_token_beyond_ascii_is_decoded_to_its_text() -> None:
    tokenizer = byte_level([b"a"], special=["<｜end▁of▁call｜>"])
    visible = marker_tokens(tokenizer, ["<｜end▁of▁call｜>"])
    assert "".join(read(tokenizer, [0, 1], visible=visible)) == "a<｜end▁of▁call｜>"


def test_a_token_beyond_the_vocabulary_has_no_text() -> None:
    assert read(byte_level([b"a"]), [0, 99]) == ["a", "", ""]
    assert "".join(read(sentencepiece(), [1, 9999, 1])) == "a a"


def test_a_split_character_is_pending() -> None:
    detokenizer = Detokenizer(byte_level([b"\xf0\x9f", b"\x98\x80"]))
    assert detokenizer.push(0) == ""
    assert detokenizer.pending
    assert detokenizer.push(1) == "😀"
    assert not detokenizer.pending
