"""Five published vocabularies: streams, stop strings, bytes of tokens, typed control tokens."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_provider import LoadOptions
from mlx_provider.chat.output.reply import Reply
from mlx_provider.families.tokenizer.hf_tokenizer import HFTokenizer, load_tokenizer
from mlx_provider.upstream.detokenizer import Detokenizer, token_bytes

pytestmark = pytest.mark.real

NAMES = ("qwen3", "gemma3", "gptoss", "llama3_1", "deepseek_v3")
TEXTS = [
    "Plain words, and a full stop.",
    "  two spaces first,\ttabs,\r\nand   runs of them   \n\n\n",
    "def f(x: int) -> str:\n    return f'{x:04d}'  # comment\n",
    "Größe, naïve, Ελληνικά, русский, العربية, हिन्दी, 日本語, 中文, 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🤷🏽‍♀️ and a \u200b that nobody sees",
    '{"a": [1, 2.5e-3, null], "b": "\\u00e9\\n"}',
    "𝕬𝖓𝖈𝖎𝖊𝖓𝖙 \U00020000 \U0001f9ff \ufffd \u00a0 \u3000 ﬁ Å",
    "1234567890 12,345.67 0xDEADBEEF",
    "<tag attr='x'>&amp;</tag> <| not a token |> [INST]",
]
TYPED_AT_MOST = 400
"""Control tokens of one vocabulary that are tried; Llama 3.1 and Gemma 3 have more, all alike."""


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tokenizer_folder: Callable[[str], Path]) -> Any:
    return load_tokenizer(tokenizer_folder(request.param), LoadOptions())


def streamed(tokenizer: HFTokenizer, tokens: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.finish()


@pytest.mark.parametrize("text", TEXTS)
def test_the_streamed_text_equals_the_encoded_text(tokenizer: HFTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, special=False)
    assert streamed(tokenizer, tokens) == tokenizer.decode(tokens) == text


def test_random_tokens_are_streamed_as_the_tokenizer_decodes_them(tokenizer: HFTokenizer) -> None:
    """Single bytes of a SentencePiece vocabulary are left out: `decode` joins broken ones anew."""
    added = tokenizer.fast.get_added_tokens_decoder()
    plain = [
        token
        for text, token in tokenizer.fast.get_vocab().items()
        if token not in added and not text.startswith("<0x")
    ]
    dice = random.Random(11)
    for _ in range(300):
        tokens = dice.choices(plain, k=dice.randint(1, 24))
        assert streamed(tokenizer, tokens) == tokenizer.decode(tokens)


@pytest.mark.parametrize("text", TEXTS)
def test_the_joined_bytes_of_tokens_equal_the_text(tokenizer: HFTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, special=False)
    assert b"".join(token_bytes(tokenizer, token) for token in tokens) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_string_is_found_across_any_tokens(tokenizer: HFTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, special=False)
    for start in range(0, len(text) - 4, 3):
        stop = text[start : start + 5]
        reply = Reply(Detokenizer(tokenizer), stops=[stop])
        deltas = [delta for token in tokens for delta in reply.push(token)]
        last, _ = reply.finish("stop")
        assert "".join(delta.content for delta in deltas + last) == text[: text.index(stop)]
        assert reply.stopped


def test_typed_control_tokens_stay_text(tokenizer: HFTokenizer) -> None:
    """Whole, doubled, inside a word, and cut over two parts that the template joins."""
    control = dict(list(tokenizer.control.content.items())[:TYPED_AT_MOST])
    tokenizer.backend.chat_template = (
        "{% for m in messages %}{{ bos_token or '' }}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    rendering = HFTokenizer(tokenizer.backend)

    def made(*parts: str) -> Any:
        content = [{"type": "text", "text": part} for part in parts]
        return rendering.render([{"role": "user", "content": content}], [], {})

    def own(tokens: list[int]) -> list[int]:
        return [token for token in tokens if token in rendering.control.content]

    tame = made("a harmless b")
    for text in control.values():
        cut = len(text) // 2
        forms = ((f"a {text} b",), (text, text), (f"x{text}x",), (text[:cut], text[cut:]))
        for parts in forms:
            prompt = made(*parts)
            assert own(prompt.tokens) == own(tame.tokens)
            assert "".join(parts) in prompt.text
            assert tokenizer.decode(prompt.tokens, skip_special=False) == prompt.text
