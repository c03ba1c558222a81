"""Replies that `renderers` writes in a family's own format, read by our parsers.

The judge's renderers turn a message into the text of a reply; the message itself is the truth.
Values are drawn to hurt: line ends at the edges, markup, quotes, other scripts, nested JSON.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import mlx_provider_reasoning_parsers as reasoning_plugin
import mlx_provider_tool_parsers as tool_plugin
from mlx_provider.chat.output.whole_reply import WholeReply, read_chunks

pytestmark = pytest.mark.real
renderers = pytest.importorskip("renderers")

REPLIES = 60
FAMILIES = {
    "Qwen3Renderer": ("hermes", "qwen3"),
    "Qwen3VLRenderer": ("hermes", "qwen3"),
    "PrimeQwen3Renderer": ("qwen3_coder", "qwen3"),
    "Qwen35Renderer": ("qwen3_coder", "qwen3"),
    "Qwen36Renderer": ("qwen3_coder", "qwen3"),
    "Qwen38Renderer": ("qwen3_coder", "qwen3"),
    "GLM45Renderer": ("glm47", "glm4"),
    "GLM5Renderer": ("glm47", "glm4"),
    "GLM51Renderer": ("glm47", "glm4"),
    "GLM53Renderer": ("glm47", "glm4"),
    "KimiK2Renderer": ("kimi_k2", "kimi_k2"),
    "KimiK25Renderer": ("kimi_k2", "kimi_k2"),
    "DeepSeekR1Renderer": ("deepseek_v3", "deepseek_r1"),
    "DeepSeekV3Renderer": ("deepseek_v3", "deepseek_v3"),
    "DeepSeekV4Renderer": ("deepseek_v4", "deepseek_v4"),
    "Llama3Renderer": ("llama3_json", None),
    "Gemma4Renderer": ("gemma4", "gemma4"),
    "Nemotron3Renderer": ("nemotron", "nemotron_v3"),
    "Nemotron35Renderer": ("nemotron", "nemotron_v3"),
    "Nemotron3UltraRenderer": ("nemotron", "nemotron_v3"),
    "LagunaM1Renderer": ("poolside_v1", "qwen3"),
    "LagunaXS2Renderer": ("poolside_v1", "qwen3"),
    "LagunaXS21Renderer": ("poolside_v1", "qwen3"),
    "LagunaS21Renderer": ("poolside_v1", "qwen3"),
    "MiniMaxM2Renderer": ("minimax_m2", "minimax_m2"),
    "Hy3Renderer": ("hy_v3_opensource", "hy_v3_opensource"),
}
THOUGHTLESS = (
    *("KimiK2Renderer", "KimiK25Renderer", "Qwen3VLRenderer", "PrimeQwen3Renderer"),
    *("DeepSeekR1Renderer", "DeepSeekV3Renderer", "DeepSeekV4Renderer"),
)
SETTINGS = {
    # without it, the judge writes no thoughts
    "LagunaXS21Renderer": [renderers.LagunaXS21RendererConfig(enable_thinking=True)],
}
TOOL_PARSERS = {parser.name: parser for parser in tool_plugin.mlx_tool_parsers()}
REASONING_PARSERS = {parser.name: parser for parser in reasoning_plugin.mlx_reasoning_parsers()}
PROPERTIES = {
    "path": {"type": "string"},
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "exact": {"type": "boolean"},
    "items": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("write_file", "get_weather")
]
TEXTS = (
    *("a", "two\nlines", "\nfirst", "last\n", "\n\n", " in front", "behind ", 'a "quote"', "it's"),
    *("x < y & z > 1", "<b>bold</b>", "{}", "[1, 2]", "null", "true", "12", "日本 é", "\\n", "\ta"),
)
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[e~[", "<turn|>"),
    *("<｜hy_eos:opensource｜>", "<|tool_response>", "<|user|>", "<|observation|>", "</assistant>"),
)
MARKUP = re.compile(r"<[|｜/]?\w*(?:tool_call|function=|invoke|param|arg_|think)|\[TOOL_CALLS\]")


class Characters:
    """A tokenizer of single characters; a special token is made when it is first asked for."""

    name_or_path = "characters"
    unk_token_id = -1
    bos_token = eos_token = pad_token = None
    bos_token_id = eos_token_id = pad_token_id = None
    special_base = 0x110000

    def __init__(self) -> None:
        self.special: list[str] = []

    def convert_tokens_to_ids(self, token: str) -> int:
        if len(token) == 1:
            return ord(token)
        if token not in self.special:
            self.special.append(token)
        return self.special_base + self.special.index(token)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        for marker in re.findall(r"<[|｜][^<>|｜]+[|｜]>|</?think>|｜DSML｜", text):
            self.convert_tokens_to_ids(marker)
        words = sorted(map(re.escape, self.special), key=len, reverse=True)
        parts = re.split(f"({'|'.join(words)})", text) if words else [text]
        found: list[int] = []
        for part in parts:
            found += [self.convert_tokens_to_ids(part)] if part in self.special else map(ord, part)
        return found

    def decode(self, ids: list[int], **_: Any) -> str:
        base = self.special_base
        return "".join(self.special[i - base] if i >= base else chr(i) for i in ids)


@dataclass(frozen=True)
class Written:
    """A reply, and the message that it was made of."""

    tokens: tuple[str, ...]
    """Text of each token but the one that ends the turn."""
    opened: bool
    """Whether the prompt ends inside a thought."""
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]


def arguments(chance: random.Random) -> dict[str, Any]:
    drawn = {
        "path": chance.choice(TEXTS),
        "text": chance.choice(TEXTS) + chance.choice(TEXTS),
        "count": chance.randrange(-9, 99),
        "exact": chance.random() < 0.5,
        "items": chance.sample(TEXTS, 2),
        "options": {"a": [1, {"b": None}], "c": chance.choice(TEXTS)},
    }
    return {key: drawn[key] for key in drawn if chance.random() < 0.6}


def replies(family: str) -> Iterator[Written]:
    chance = random.Random(family)
    tokenizer = Characters()
    renderer = getattr(renderers, family)(tokenizer, *SETTINGS.get(family, ()))
    user = {"role": "user", "content": "Do it."}
    prompt = renderer.render([user], tools=TOOLS, add_generation_prompt=True).token_ids
    most = 1 if family == "Llama3Renderer" else 3
    for _ in range(REPLIES):
        number = chance.randrange(most + 1)
        calls = [
            (chance.choice(("write_file", "get_weather")), arguments(chance)) for _ in range(number)
        ]
        plain = not (calls and family == "Llama3Renderer")
        content = chance.choice(("", "Done.", "Well: 1 < 2.")) if calls else "All is done."
        reasoning = chance.choice(("", "I think.", "First a\nthen b.")) if _thinks(family) else ""
        message = {
            "role": "assistant",
            "content": content if plain else "",
            "reasoning_content": reasoning,
            "tool_calls": [
                {"id": f"functions.{name}:{i}", "type": "function", "function": function}
                for i, (name, given) in enumerate(calls)
                for function in [{"name": name, "arguments": json.dumps(given)}]
            ],
        }
        whole = renderer.render([user, message], tools=TOOLS).token_ids
        start = len(prompt) if whole[: len(prompt)] == prompt else _shared(whole, prompt)
        before = tokenizer.decode(whole[:start]).rstrip()
        opened = before.endswith(("<think>", "<think:opensource>"))
        tokens = tuple(tokenizer.decode([token]) for token in whole[start:])
        if not opened and tokens[0] == "</think>":  # the prompt of a turn without thoughts ends so
            tokens = tokens[1:]
        yield Written(without_end(tokens), opened, reasoning, message["content"], calls)


def _thinks(family: str) -> bool:
    """Whether the judge writes the thoughts of a last turn that calls tools."""
    return FAMILIES[family][1] is not None and family not in THOUGHTLESS


def _shared(whole: list[int], prompt: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(whole, prompt, strict=False)) if a != b), 0)


def read(family: str, written: Written, chunks: list[str]) -> WholeReply:
    tools, thoughts = FAMILIES[family]
    return read_chunks(
        chunks,
        tool_parser=TOOL_PARSERS[tools],
        reasoning_parser=REASONING_PARSERS[thoughts] if thoughts else None,
        reasoning_open=written.opened,
        tools=TOOLS,
    )


def pieces(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def without_end(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """As the engine hands it over: the token that ends a turn is no text."""
    last = len(tokens)
    while last and not tokens[last - 1].strip():
        last -= 1
    return tokens[: last - 1] if last and tokens[last - 1] in ENDS else tokens[:last]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_reply_is_parsed_to_its_message(family: str) -> None:
    chance = random.Random(1)
    for written in replies(family):
        text = "".join(written.tokens)
        for chunks in ([text], list(text), pieces(text, chance)):
            found = read(family, written, chunks)
            told = repr(text)
            assert not found.faults, told
            assert found.whole_calls == written.calls, told
            assert found.content.strip() == written.content, told
            assert found.reasoning.strip() == written.reasoning, told


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_reply_gives_no_call_and_no_markup_of_its_own(family: str) -> None:
    chance = random.Random(2)
    for written in replies(family):
        for end in chance.sample(range(len(written.tokens) + 1), min(len(written.tokens), 12)):
            cut = "".join(written.tokens[:end])
            found = read(family, written, [cut])
            told = repr(cut)
            assert not found.faults, told
            assert [name for name, _ in found.calls] == [
                name for name, _ in written.calls[: len(found.calls)]
            ], told
            assert all(call in written.calls for call in found.whole_calls), told
            assert not MARKUP.search(found.content), told
            assert found == read(family, written, list(cut)), told
