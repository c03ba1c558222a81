"""Long texts in pieces have the tokens of the whole."""

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as words
from transformers import PreTrainedTokenizerFast

from mlx_provider.errors import BadRequest, ContextTooLong
from mlx_provider.families.tokenizer import long_text
from mlx_provider.families.tokenizer.hf_tokenizer import HFTokenizer
from mlx_provider.families.tokenizer.long_text import LongText
from mlx_provider.families.tokenizer.spelling import Hidden
from noted_calls import note_calls

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+(?i:'s|'t)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{M}]+[\p{Ll}\p{Lo}\p{M}]*|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ATOMS = [
    "the", "quick ", "Brown", "fox's", " ", "  ", "\n", "\n\n", "\t", "    ", "\r\n", "1", "2024",
    "{", '": "', "}", "://", "_", "--", "漢字", "かな", "。", "é", "e\u0301", "\u0301", "한", "😀",
    "\u200b", "ЖЗ", "==========", "aaaaaaa", "<|mark|>", "<|", "|>", "x" * 40, " " * 30, "'ll", "ß",
]  # fmt: skip


def text_of(seed: int, length: int) -> str:
    chance = random.Random(seed)
    weights = [chance.random() ** 3 for _ in ATOMS]
    return "".join(chance.choices(ATOMS, weights, k=length))


def byte_level(pattern: str | None, normaliser: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    if normaliser is not None:
        made.normalizer = normaliser
    split = [] if pattern is None else [words.Split(Regex(pattern), "isolated")]
    made.pre_tokenizer = words.Sequence(
        [*split, words.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    )
    made.decoder = decoders.ByteLevel()
    return trained(made, words.ByteLevel.alphabet())


def sentence_piece(normaliser: Any) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normaliser
    return trained(made, [], [f"<0x{byte:02X}>" for byte in range(256)])


def trained(made: Tokenizer, alphabet: list[str], special: list[str] | None = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<unk>", *(special or [])],
        show_progress=False, max_token_length=24,
    )  # fmt: skip
    parts = [part for i in range(30) for part in text_of(i, 60).split("<|mark|>")]
    made.train_from_iterator(parts, trainer)
    made.add_special_tokens([AddedToken("<|mark|>", normalized=False)])
    return made


KINDS = {
    "gpt2": lambda: byte_level(None),
    "llama": lambda: byte_level(LLAMA),
    "cased, NFC": lambda: byte_level(CASED, normalizers.NFC()),
    "one word": lambda: sentence_piece(normalizers.Replace(" ", "▁")),
    "prepended": lambda: sentence_piece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def fast(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


def wrapped(fast: Tokenizer) -> HFTokenizer:
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=fast))


def test_a_long_text_encoded_in_pieces_has_the_tokens_of_the_whole(
    fast: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_text, "PIECE", 200)
    monkeypatch.setattr(long_text, "NEAR", 120)
    monkeypatch.setattr("mlx_provider.families.tokenizer.hf_tokenizer.PIECE", 200)
    tokenizer, cuts = wrapped(fast), 0

    def tokens_of(piece: str) -> list[int]:
        return list(fast.encode(piece, add_special_tokens=False).ids)

    for seed in range(8):
        text = text_of(seed, 700)
        whole = fast.encode(text, add_special_tokens=False)
        cuts += len(list(LongText(fast, tokens_of).pieces(text))) - 1
        assert tokenizer.encode(text, special=False) == whole.ids
        located = tokenizer.encode_with_offsets(text, Hidden((), (), {}))
        assert located.ids == whole.ids
        assert located.starts == [start for start, _ in whole.offsets]
    # what begins every text with a space of its own cannot be cut
    prepends = bool(fast.normalizer) and "Prepend" in str(fast.normalizer)
    assert cuts == 0 if prepends else cuts > 50


def test_special_tokens_stay_around_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers.processors import TemplateProcessing

    fast = byte_level(LLAMA)
    mark = fast.token_to_id("<|mark|>")
    fast.post_processor = TemplateProcessing(
        single="<|mark|> $A <unk>", special_tokens=[("<|mark|>", mark), ("<unk>", 0)]
    )
    text = text_of(1, 20_000)
    tokens = wrapped(fast).encode(text, special=True)
    assert tokens == fast.encode(text).ids
    assert (tokens[0], tokens[-1]) == (mark, 0)


def test_a_text_beyond_the_context_is_refused_after_encoding_a_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = PreTrainedTokenizerFast(tokenizer_object=byte_level(LLAMA))
    tokenizer = HFTokenizer(backend).within(5000)
    encoded = note_calls(monkeypatch, backend, "encode", lambda text, **_: len(text))
    with pytest.raises(ContextTooLong, match=r"too long: at least [0-9]+ tokens > 4999 maximum"):
        tokenizer.encode("1 " * 50_000, special=False)
    assert 0 < sum(encoded) < 60_000, "no more than it takes to tell"
    assert tokenizer.encode("fox", special=False)


def test_a_text_without_a_place_to_cut_is_refused() -> None:
    with pytest.raises(BadRequest, match="cannot be divided"):
        wrapped(byte_level(LLAMA)).encode("a" * (long_text.UNDIVIDED + 1), special=False)
