"""Real chat templates get what an agent sends in their own form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.chat.messages.tools_as_text import (
    described_tools,
    fold_tools,
    has_tools,
    lacks_tools,
    with_described_tools,
)
from mlx_provider.families.tokenizer import HFTokenizer, load_tokenizer
from mlx_provider.families.tokenizer.dialect import has_system_role, wants_turns
from mlx_provider.families.tokenizer.template_fit import fit_messages, fit_tools
from mlx_provider.records import LoadOptions

pytestmark = pytest.mark.real

Folders = Callable[[str], Path]
ARGUMENTS = {"path": "src/naïve.py", "lines": [1, 2.5], "deep": {"a": None}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": ["string", "null"]}},
                "required": ["path"],
            },
        },
    },
    {"type": "function", "function": {"name": "ping"}},
]


def turn(content: str | None, count: int = 1) -> list[dict[str, Any]]:
    """A turn with calls and their results, as OpenAI clients send them."""
    function = {"name": "read_file", "arguments": json.dumps(ARGUMENTS)}
    ids = [f"call_0c8a1fd2e3b94c5d{i}" for i in range(count)]
    calls = [{"id": i, "type": "function", "function": function} for i in ids]
    results = [{"role": "tool", "tool_call_id": i, "content": f"xRESULT{i[-1]}x"} for i in ids]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


ASKED = [
    {"role": "system", "content": "xSYSTEMx"},
    {"role": "user", "content": "xASKx"},
]
MORE = [{"role": "assistant", "content": "xANSWERx"}, {"role": "user", "content": "xAGAINx"}]
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "calls alone": [*ASKED, *turn(None)],
    "text and calls": [*ASKED, *turn("xSAYx")],
    "several calls": [*ASKED, *turn("", 2), *MORE, *turn(None), *MORE],
}


def prompt_of(
    tokenizer: HFTokenizer, messages: list[Any], tools: list[Any]
) -> tuple[str, list[int]]:
    """As a request's: its text and tokens."""
    form = tokenizer.form
    lacks = bool(tools) and lacks_tools(form, messages)
    sent = with_described_tools(messages, described_tools(tools, None)) if lacks else messages
    found: list[Any] = normalise(
        sent,
        hoist_system=False,
        system_role=has_system_role(tokenizer),
        alternate=wants_turns(tokenizer),
        text_parts=form.text_parts,
    ).messages
    if has_tools(found) and not form.takes_calls:
        found = fold_tools(found, None, tools)
    rendered = tokenizer.render(
        fit_messages(found, form), [] if lacks else fit_tools(tools, form), {}
    )
    return rendered.text, rendered.tokens


def tokenizer_of(folder: Path) -> HFTokenizer:
    return load_tokenizer(folder, LoadOptions())


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek_v3", "llama3_1"])
@pytest.mark.parametrize("history", HISTORIES)
def test_nothing_is_lost(name: str, history: str, tokenizer_folder: Folders) -> None:
    tokenizer = tokenizer_of(tokenizer_folder(name))
    messages = HISTORIES[history]
    words = {w for m in messages for w in (m["content"] or "").split()} | {"read_file", "naïve"}
    for tools in ([], TOOLS):
        text, tokens = prompt_of(tokenizer, messages, tools)
        assert {word for word in words if word not in text} == set()
        assert "None" not in text
        assert tokenizer.decode(tokens, skip_special=False) == text
        assert ("Reads a file." in text and "ping" in text) == bool(tools)


NATIVE: dict[str, dict[str, Any]] = {
    "qwen3": {"content": "", "text": False},
    "deepseek_v3": {"content": None, "text": True},
}
"""What the templates of these models take beside calls, by their makers' source."""


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("history", ["calls alone", "several calls"])
def test_calls_are_written_as_the_template_writes_them(
    name: str, history: str, tokenizer_folder: Folders
) -> None:
    tokenizer, native = tokenizer_of(tokenizer_folder(name)), NATIVE[name]
    messages = json.loads(json.dumps(HISTORIES[history]))
    for message in messages:
        for call in message.get("tool_calls", ()):
            message["content"] = native["content"]
            text = json.dumps(ARGUMENTS, ensure_ascii=False)
            call["function"]["arguments"] = text if native["text"] else ARGUMENTS
    tools = TOOLS if tokenizer.form.shows_tools == "always" else None
    template = tokenizer.chat_template
    tokens = tokenizer.backend.special_tokens_map
    ((theirs,), _) = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=True, **tokens
    )
    assert prompt_of(tokenizer, HISTORIES[history], tools or [])[0] == theirs


def test_a_turn_begins_with_the_one_before(tokenizer_folder: Folders) -> None:
    tokenizer = tokenizer_of(tokenizer_folder("qwen3"))
    first, tokens = prompt_of(tokenizer, ASKED, TOOLS)
    second, more = prompt_of(tokenizer, HISTORIES["calls alone"], TOOLS)
    assert second.startswith(first)
    assert more[: len(tokens)] == tokens


def test_parts_of_text_stay_apart_where_the_template_reads_them(tokenizer_folder: Folders) -> None:
    parts = [{"type": "text", "text": text} for text in ("xAx", "xBx")]
    asked = [{"role": "user", "content": parts}]
    text, _ = prompt_of(tokenizer_of(tokenizer_folder("gemma3")), asked, [])
    assert "xAxxBx" in text
    text, _ = prompt_of(tokenizer_of(tokenizer_folder("qwen3")), asked, [])
    assert "xAx\n\nxBx" in text
