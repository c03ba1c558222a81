"""Replies in the harmony format that `openai-harmony` writes, read by our parsers.

Its vocabulary comes from the network; the tokenizer of gpt-oss holds the same, from which the file
is written here.
"""

import base64
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_provider import LoadOptions
from mlx_provider.chat.output.whole_reply import WholeReply, read_chunks
from mlx_provider.families.tokenizer.hf_tokenizer import load_tokenizer
from mlx_provider.testing.conformance.calls import PLAIN, SCHEMA
from mlx_provider.upstream.detokenizer import token_bytes
from mlx_provider_tool_parsers import harmony

pytestmark = pytest.mark.real
openai_harmony = pytest.importorskip("openai_harmony")

REPLIES = 60
CUTS = 12
TEXT_TOKENS = 199_998
"""The special tokens follow."""
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""Of `o200k_base.tiktoken`, as openai-harmony 0.0.8 holds it."""
(TOOL_PARSER,) = harmony.PARSERS
(REASONING_PARSER,) = harmony.REASONING_PARSERS
NAMES = ("write_file", "mcp__server__get-it", "a.b")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
WORDS = (
    *("a", "two\nlines", "é 日本 👩‍👩‍👧", 'a "quote"', "x < y | z > 1", "<|", "analysis", "final"),
    *("to=functions.f", "{}", "[1, 2]", "null", "commentary to=you", "assistant", "\\n", "\ta"),
)


@dataclass(frozen=True)
class Written:
    """A reply, and the messages that it was made of."""

    tokens: list[int]
    """Without the one that ends the turn."""
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]


@pytest.fixture(scope="module")
def judge(
    tokenizer_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """openai-harmony's encoding."""
    tokenizer = load_tokenizer(tokenizer_folder("gptoss"), LoadOptions())
    lines = (
        base64.b64encode(token_bytes(tokenizer, token)) + b" %d\n" % token
        for token in range(TEXT_TOKENS)
    )
    vocabulary = b"".join(lines)
    assert hashlib.sha256(vocabulary).hexdigest() == SHA256
    folder = tmp_path_factory.mktemp("encodings")
    (folder / "o200k_base.tiktoken").write_bytes(vocabulary)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        name = openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS
        yield openai_harmony.load_harmony_encoding(name)


def said(text: str, channel: str) -> Any:
    role = openai_harmony.Role.ASSISTANT
    return openai_harmony.Message.from_role_and_content(role, text).with_channel(channel)


def drawn_text(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randrange(1, 5))).strip()


def turn(chance: random.Random) -> Iterator[Any]:
    """Thoughts, texts and calls in the order of real replies; an answer, or calls at the end."""
    for _ in range(chance.randrange(3)):
        if chance.random() < 0.8:
            yield said(drawn_text(chance), "analysis")
        if chance.random() < 0.3:
            yield said(drawn_text(chance), "commentary")
        if chance.random() < 0.7:
            arguments = {"path": drawn_text(chance), "deep": {"a": [1, None, drawn_text(chance)]}}
            text = json.dumps(arguments, ensure_ascii=chance.random() < 0.5)
            call = said(text, chance.choice(("commentary", "commentary", "analysis")))
            call = call.with_recipient(f"functions.{chance.choice(NAMES)}")
            yield call.with_content_type(chance.choice(("<|constrain|>json", "json")))
    yield said(drawn_text(chance), "final")


def written(judge: Any, messages: list[Any]) -> Written:
    """As the model would complete a prompt that ends behind the role."""
    user = openai_harmony.Message.from_role_and_content(openai_harmony.Role.USER, "Do it.")
    conversation = openai_harmony.Conversation.from_messages([user, *messages])
    keep = openai_harmony.RenderConversationConfig(auto_drop_analysis=False)
    whole = judge.render_conversation_for_training(conversation, keep)
    asked = openai_harmony.Conversation.from_messages([user])
    prompt = judge.render_conversation_for_completion(asked, openai_harmony.Role.ASSISTANT)
    assert whole[: len(prompt)] == prompt
    assert whole[-1] in judge.stop_tokens_for_assistant_actions()
    return Written(whole[len(prompt) : -1], *taken(messages))


def taken(messages: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thoughts, answer and calls of messages."""
    reasoning = content = ""
    calls = []
    for message in messages:
        text = message.content[0].text
        if message.recipient is not None:
            calls.append((message.recipient.removeprefix("functions."), json.loads(text)))
        elif message.channel == "analysis":
            reasoning += text
        else:
            content += text
    return reasoning, content, calls


def replies(judge: Any, seed: str) -> Iterator[Written]:
    chance = random.Random(seed)
    for _ in range(REPLIES):
        messages = list(turn(chance))
        calls = [at for at, message in enumerate(messages) if message.recipient is not None]
        if calls and chance.random() < 0.7:
            messages = messages[: calls[-1] + 1]
        yield written(judge, messages)


def pieces(text: str, chance: random.Random) -> list[str]:
    cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), CUTS)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(chunks: list[str]) -> WholeReply:
    return read_chunks(
        chunks, tool_parser=TOOL_PARSER, reasoning_parser=REASONING_PARSER, tools=TOOLS
    )


def test_a_harmony_reply_is_parsed_to_the_messages_that_were_rendered(judge: Any) -> None:
    chance = random.Random(1)
    for reply in replies(judge, "whole"):
        text = judge.decode_utf8(reply.tokens)
        for chunks in ([text], list(text), pieces(text, chance)):
            found = read(chunks)
            assert not found.faults, text
            assert found.whole_calls == reply.calls, text
            assert (found.reasoning, found.content) == (reply.reasoning, reply.content), text


def test_a_cut_harmony_reply_is_parsed_as_by_openai_harmony(judge: Any) -> None:
    chance = random.Random(2)
    for reply in replies(judge, "cut"):
        ends = range(1, len(reply.tokens))
        for end in chance.sample(ends, min(len(ends), CUTS)):
            cut = judge.decode(reply.tokens[:end]).removesuffix("\ufffd")
            stream = openai_harmony.StreamableParser(judge, openai_harmony.Role.ASSISTANT)
            for token in reply.tokens[:end]:
                stream.process(token)
            reasoning, content, calls = taken(stream.messages)
            found = read([cut])
            assert not found.faults, cut
            assert reply.reasoning.startswith(found.reasoning), cut
            assert found.reasoning.startswith(reasoning), cut
            assert reply.content.startswith(found.content), cut
            assert found.content.startswith(content), cut
            assert found.whole_calls == reply.calls[: len(found.whole_calls)], cut
            assert len(found.whole_calls) >= len(calls), cut
            assert [name for name, _ in found.calls] == [
                name for name, _ in reply.calls[: len(found.calls)]
            ], cut
            assert found == read(list(cut)), cut


def test_a_forced_harmony_call_is_parsed_by_openai_harmony(judge: Any) -> None:
    text = TOOL_PARSER.call_grammar().write("put", PLAIN, SCHEMA)
    tokens = judge.encode(text, allowed_special="all")
    call_end = judge.encode(harmony.CALL, allowed_special="all")
    role = openai_harmony.Role.ASSISTANT
    (message,) = judge.parse_messages_from_completion_tokens([*tokens, *call_end], role)
    assert (message.channel, message.recipient) == ("commentary", "functions.put")
    assert json.loads(message.content[0].text) == PLAIN
