"""How a scripted model writes tool calls, and the chat template that shows them the same way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from .script import Call

START, END = "<|im_start|>", "<|im_end|>"
RESULT = "<tool_response>\n"
TOOLS = "\n<tools>\n"

_TEMPLATE = """\
{%- macro said(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content or [] -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set first = said(messages[0].content) if messages[0].role == 'system' else '' -%}
{%- if tools or first -%}
{{ '<|im_start|>system\\n' ~ first }}
{%- if tools -%}
{{ '\\n\\n# Tools\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools>\\n\\nTo call one, write:\\n<tool_call>\\nEXAMPLE\\n</tool_call>' }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' ~ said(message.content) }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.reasoning_content -%}
{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' }}
{%- endif -%}
{{ said(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if said(message.content) or not loop.first }}
{{- '<tool_call>\\n' }}CALL{{ '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

_JSON_CALL = (
    """{{ '{"name": "' ~ call.function.name ~ '", "arguments": ' """
    "~ (call.function.arguments | tojson) ~ '}' }}"
)
_TAGGED_CALL = """\
{{ '<function=' ~ call.function.name ~ '>\\n' }}
{%- for name, value in call.function.arguments.items() -%}
{{ '<parameter=' ~ name ~ '>\\n' }}
{{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor -%}
{{ '</function>' }}"""


@dataclass(frozen=True)
class Format:
    name: str
    template: str
    _call: Callable[[Call], str]

    def calls(self, calls: tuple[Call, ...]) -> str:
        return "\n".join(f"<tool_call>\n{self._call(call)}\n</tool_call>" for call in calls)


def _template(example: str, call: str) -> str:
    return _TEMPLATE.replace("EXAMPLE", example.replace("\n", "\\n")).replace("CALL", call)


def _as_json(call: Call) -> str:
    written = {"name": call.name, "arguments": dict(call.arguments)}
    return json.dumps(written, ensure_ascii=False)


def _as_tags(call: Call) -> str:
    written = (
        f"<parameter={name}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
        "</parameter>\n"
        for name, value in call.arguments.items()
    )
    return f"<function={call.name}>\n{''.join(written)}</function>"


FORMATS = {
    each.name: each
    for each in (
        Format(
            "json",
            _template('{"name": <function-name>, "arguments": <args-json-object>}', _JSON_CALL),
            _as_json,
        ),
        Format(
            "tags",
            _template(
                "<function=name>\n<parameter=name>\nvalue\n</parameter>\n</function>", _TAGGED_CALL
            ),
            _as_tags,
        ),
    )
}
"""By name: `json`, as Hermes and Qwen have it; `tags`, as Qwen's coders do."""
