"""Real chat templates get what an agent sends in their own form."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.chat.messages.tools_as_text import describe_tools, write_as_text
from mlx_provider.families.tokenizer import HFTokenizer, load_tokenizer
from mlx_provider.families.tokenizer.template import fit_messages, fit_tools
from mlx_provider.families.tokenizer.template_probe import has_system_role, wants_turns
from mlx_provider.records import LoadOptions
from mlx_provider.serving.prompt import has_tools, hides_tools

pytestmark = pytest.mark.real

Folders = Callable[[str], Path]
ARGUMENTS = {"path": "src/naïve.py", "lines": [1, 2.5], "deep": {"a": None}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


PATH = {"type": "object", "properties": {"path": {"type": ["string", "null"]}}}
TOOLS = [
    tool("read_file", description="Reads a file.", parameters={**PATH, "required": ["path"]}),
    tool("ping"),
]
ODD = [
    tool("read_file"),
    tool("ping", parameters={"type": "object", "properties": {}}),
    tool(
        "count",
        parameters={
            "type": "object",
            "properties": {
                "most": {"type": ["integer", "null"]},
                "unit": {"enum": ["line", "word"]},
                "within": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "each": {"type": "array", "items": {"type": ["string", "number"]}},
                "more": {"type": "object", "properties": {"any": {}}},
            },
        },
    ),
]
"""Without what the API leaves optional, and with what templates stumble over."""
TOOL_LISTS: list[list[dict[str, Any]]] = [[], TOOLS, ODD]


def turn(
    content: Any, *results: Any, form: str = "call_0c8a1fd2e3b94c5d{}", **more: Any
) -> list[dict[str, Any]]:
    """A turn with calls and their results, as OpenAI clients send them."""
    function = {"name": "read_file", "arguments": json.dumps(ARGUMENTS)}
    ids = [form.format(i) for i in range(len(results))]
    calls = [{"id": i, "type": "function", "function": function} for i in ids]
    told = [
        {"role": "tool", "tool_call_id": i, "content": result}
        for i, result in zip(ids, results, strict=True)
    ]
    return [{"role": "assistant", "content": content, "tool_calls": calls, **more}, *told]


def older(result: str) -> list[dict[str, Any]]:
    function = {"name": "read_file", "arguments": json.dumps(ARGUMENTS)}
    call = {"role": "assistant", "content": None, "function_call": function}
    return [call, {"role": "function", "name": "read_file", "content": result}]


def text_parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


ASKED = [{"role": "system", "content": "xSYSTEMx"}, {"role": "user", "content": "xASKx"}]
SAID = {"role": "assistant", "content": "xANSWERx"}
MORE = [SAID, {"role": "user", "content": "xAGAINx"}]
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "calls alone": [*ASKED, *turn(None, "xFIRSTx")],
    "no system message": [*ASKED[1:], *turn(None, "xFIRSTx"), *MORE],
    "text and calls": [*ASKED, *turn("xSAYx", "xFIRSTx")],
    "several calls": [*ASKED, *turn("", "xFIRSTx", "xSECONDx"), *MORE, *turn(None, "xTHIRDx")],
    "one after another": [*ASKED, *turn(None, "xFIRSTx"), *turn("xSAYx", "xSECONDx"), SAID],
    "ids of others": [*ASKED, *turn(None, "xFIRSTx", "xSECONDx", form="toolu_01A09q90qw90lq9{}")],
    "thoughts": [*ASKED, *turn(None, "xFIRSTx", reasoning_content="I think."), *MORE],
    "thoughts and text": [*ASKED, *turn("xSAYx", "xFIRSTx", reasoning_content="I think.")],
    "parts": [
        {"role": "user", "content": text_parts("xASKx", "xPARTx")},
        *turn(None, text_parts("xFIRSTx", "xLASTx")),
    ],
    "a user speaks on": [*ASKED, *turn(None, "xFIRSTx"), MORE[1]],
    "the older form": [*ASKED, *older("xFIRSTx"), *MORE],
}


def content_words(message: dict[str, Any]) -> list[str]:
    return re.findall(r"x[A-Z]+x", json.dumps(message["content"]))


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    listed = [call["function"] for call in message.get("tool_calls", ())]
    return [*listed, *([message["function_call"]] if "function_call" in message else [])]


def prompt_of(
    tokenizer: HFTokenizer, messages: list[Any], tools: list[Any]
) -> tuple[str, list[int]]:
    """As a request's: its text and tokens."""
    form = tokenizer.form
    lacks = bool(tools) and hides_tools(form, messages)
    found: list[Any] = normalise(
        messages,
        hoist_system=False,
        system_role=has_system_role(tokenizer),
        alternate=wants_turns(tokenizer),
        text_parts=form.text_parts,
        about_tools=describe_tools(tools, None) if lacks else "",
    ).messages
    if has_tools(found) and not form.takes_calls:
        found = write_as_text(found, None, tools)
    rendered = tokenizer.render(
        fit_messages(found, form), [] if lacks else fit_tools(tools, form), {}
    )
    return rendered.text, rendered.tokens


@cache
def tokenizer_of(folder: Path) -> HFTokenizer:
    return load_tokenizer(folder, LoadOptions())


@pytest.fixture(params=["qwen3", "gemma3", "deepseek_v3", "llama3_1", "smollm2"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_folder: Folders) -> HFTokenizer:
    own = request.param == "smollm2"
    folder = request.getfixturevalue("smollm2") if own else tokenizer_folder(request.param)
    return tokenizer_of(folder)


@pytest.mark.parametrize("history", HISTORIES)
def test_all_parts_of_a_history_are_in_the_prompt(tokenizer: HFTokenizer, history: str) -> None:
    messages = HISTORIES[history]
    words = [word for message in messages for word in content_words(message)]
    calls = [call["name"] for message in messages for call in calls_of(message)]
    for tools in TOOL_LISTS:
        shown, _ = prompt_of(tokenizer, ASKED[1:], tools)
        text, tokens = prompt_of(tokenizer, messages, tools)
        assert re.findall(r"x[A-Z]+x", text) == words
        assert text.count("read_file") >= shown.count("read_file") + len(calls)
        assert text.count("naïve") == len(calls)
        assert "None" not in text
        assert tokenizer.decode(tokens, skip_special=False) == text
        names = [each["function"]["name"] for each in tools]
        assert [name for name in names if name not in text] == []
        assert ("Reads a file." in text) == (tools is TOOLS)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_the_detected_form_says_which_templates_render_calls_and_tools(
    name: str, tokenizer_folder: Folders
) -> None:
    form = tokenizer_of(tokenizer_folder(name)).form
    assert form.takes_calls
    assert (form.shows_tools == "always") == (name == "qwen3")


def test_thoughts_before_a_call_are_in_the_prompt(tokenizer_folder: Folders) -> None:
    text, _ = prompt_of(tokenizer_of(tokenizer_folder("qwen3")), HISTORIES["thoughts and text"], [])
    assert "<think>\nI think.\n</think>\n\nxSAYx" in text


def test_an_image_stands_where_the_user_put_it(tokenizer_folder: Folders) -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    image = {"type": "image_url", "image_url": {"url": pixel}}
    asked = {"role": "user", "content": [*text_parts("xAx"), image, *text_parts("xBx")]}
    history = [asked, *turn(None, "xFIRSTx")]
    text, _ = prompt_of(tokenizer_of(tokenizer_folder("gemma3")), history, TOOLS)
    assert text.count("<start_of_image>") == 1
    assert re.search("xAx.*<start_of_image>.*xBx.*xFIRSTx", text, re.DOTALL)


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


def test_the_prompt_of_the_next_turn_begins_with_the_last_one(tokenizer_folder: Folders) -> None:
    tokenizer = tokenizer_of(tokenizer_folder("qwen3"))
    first, tokens = prompt_of(tokenizer, ASKED, TOOLS)
    second, more = prompt_of(tokenizer, HISTORIES["calls alone"], TOOLS)
    assert second.startswith(first)
    assert more[: len(tokens)] == tokens


def test_text_parts_are_joined_as_the_template_demands(tokenizer_folder: Folders) -> None:
    parts = [{"type": "text", "text": text} for text in ("xAx", "xBx")]
    asked = [{"role": "user", "content": parts}]
    text, _ = prompt_of(tokenizer_of(tokenizer_folder("gemma3")), asked, [])
    assert "xAxxBx" in text
    text, _ = prompt_of(tokenizer_of(tokenizer_folder("qwen3")), asked, [])
    assert "xAx\n\nxBx" in text
