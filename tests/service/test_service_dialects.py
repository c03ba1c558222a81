"""Conversations of every form, to models whose templates support few of them."""

import re
from typing import Any

import pytest

from mlx_provider import LoadOptions
from mlx_provider.errors import BadRequest
from mlx_provider.families.text import load_text
from tiny.models import tiny_image_part as image

NO_SYSTEM = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
DROPS_SYSTEM = """\
{%- for message in messages if message.role != 'system' -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
NATIVE_TOOLS = """\
{%- set turn = namespace(index=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls -%}
{%- if (message.role == 'user') != (turn.index % 2 == 0) -%}
{{ raise_exception('roles must alternate user and assistant, tool messages apart') }}
{%- endif -%}
{%- set turn.index = turn.index + 1 -%}
{%- endif -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] -%}{{ '[CALL]' ~ call.function.name }}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
TEMPLATES = {"no system": NO_SYSTEM, "drops system": DROPS_SYSTEM, "tools": NATIVE_TOOLS}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def turns(*roles: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"w-{c}"} for role, c in zip(roles, "abcde", strict=False)]


CONVERSATIONS = {
    "two users": turns("user", "user"),
    "system": turns("system", "user"),
    "late system": turns("system", "user", "assistant", "system", "user"),
    "two assistants": turns("user", "assistant", "assistant", "user"),
    "a greeting": turns("assistant", "user"),
    "a tool's result, then the user": [
        {"role": "user", "content": "w-a"},
        {"role": "assistant", "content": "w-b", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "w-c"},
        {"role": "user", "content": "w-d"},
        {"role": "assistant", "content": "w-e"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "w-f"},
    ],
}
WITH_IMAGES: dict[str, list[dict[str, Any]]] = {
    "an image, then a text": [
        {"role": "user", "content": [image()]},
        {"role": "user", "content": [text("w-a")]},
    ],
    "images on both sides": [
        {"role": "system", "content": "w-a"},
        {"role": "user", "content": [text("w-b"), image()]},
        {"role": "user", "content": [image(2), text("w-c")]},
    ],
    "an image of a tool": [
        {"role": "user", "content": "w-a"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("w-b"), image()]},
        {"role": "user", "content": [text("w-c"), image(2)]},
    ],
}


def assert_whole(prompt: str, messages: list[dict[str, Any]], in_order: bool = True) -> None:
    """Every text is in the prompt, separate from the others."""
    words = re.findall(r"w-[a-f]", str(messages))
    found = re.findall(r"\bw-[a-f]\b", prompt)
    assert found == words if in_order else sorted(found) == words


@pytest.mark.parametrize("template", list(TEMPLATES))
@pytest.mark.parametrize("conversation", list(CONVERSATIONS))
def test_conversations_reach_templates_whole(tiny: Any, template: str, conversation: str) -> None:
    model, messages = tiny("qwen3", TEMPLATES[template]), CONVERSATIONS[conversation]
    assert_whole(model.prompt_of(messages=messages), messages)


@pytest.mark.parametrize("conversation", [*CONVERSATIONS, *WITH_IMAGES])
def test_conversations_with_images_reach_a_template_whole(tiny: Any, conversation: str) -> None:
    messages = (CONVERSATIONS | WITH_IMAGES)[conversation]
    model = tiny("gemma3")
    prompt = model.prompt_of(messages=messages)
    assert_whole(prompt, messages, in_order=conversation != "late system")
    assert prompt.count("<start_of_image>") == str(messages).count("data:image")
    if conversation in WITH_IMAGES:
        assert model.ask(messages=messages, max_tokens=2).only.reason == "length"


@pytest.mark.parametrize(
    ("template", "alternate", "system_role"),
    [(NO_SYSTEM, True, False), (DROPS_SYSTEM, False, False), (NATIVE_TOOLS, True, True)],
    ids=list(TEMPLATES),
)
def test_what_a_template_supports_is_detected_at_load(
    build_tiny: Any, template: str, alternate: bool, system_role: bool
) -> None:
    info = load_text(build_tiny("qwen3", template), LoadOptions()).info
    assert (info.alternate, info.system_role) == (alternate, system_role)


def test_images_of_tools_stay_in_place_if_the_template_shows_them(tiny: Any) -> None:
    messages = WITH_IMAGES["an image of a tool"]
    shown = tiny("qwen3_vl").prompt_of(messages=messages)
    assert "Attached to the tool result" not in shown
    assert shown.index("w-b") < shown.index("<|image_pad|>") < shown.index("w-c")
    assert "Attached to the tool result" in tiny("gemma3").prompt_of(messages=messages)


def test_the_error_of_a_template_that_refuses_everything_is_reported(tiny: Any) -> None:
    broken = tiny("qwen3", "{{ raise_exception('no') }}")
    with pytest.raises(BadRequest, match="template refuses"):
        broken.prompt_of(messages=CONVERSATIONS["two users"])
