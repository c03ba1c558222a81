"""A third-party format is enforced like a built-in one: its parser has the grammar of its calls."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.requests import Sampling

EXAMPLES = Path(__file__).parents[2] / "examples"
ANGLE = EXAMPLES / "third_party_plugin" / "mlx_provider_angle.py"
COMMAND_A = EXAMPLES / "format_command_a" / "mlx_provider_command_a.py"
TAGS = """
import json
import re

from mlx_provider import CallGrammar, TaggedArguments, ToolCall, ToolParser, hookimpl
from mlx_provider.records import listed_parameters, value_types


def parse(text, tools):
    name, body = re.fullmatch(r"(\\w+)\\((.*)\\)", text, re.DOTALL).groups()
    (function,) = [t["function"] for t in tools if t["function"]["name"] == name]
    schemas = listed_parameters(function["parameters"])[0]
    found = {}
    for key, value in re.findall(r"@(\\w+)=(.*?);;", body, re.DOTALL):
        types = value_types(schemas[key], function["parameters"])
        found[key] = value if types == {"string"} else json.loads(value)
    return [ToolCall(name, json.dumps(found))]


@hookimpl
def mlx_tool_parsers():
    yield ToolParser(
        "at_signs",
        "<<",
        ">>",
        parse,
        lambda template: "<<" in template,
        grammar=CallGrammar(
            "<<{name}(", ")>>", between=" ", tagged=TaggedArguments("@", "=", ";;", barred=(">>",))
        ),
    )
"""
SILENT = """
from mlx_provider import ToolCall, ToolParser, hookimpl


def parse(text, tools):
    if text.strip() != "ping":
        raise ValueError("no call")
    return [ToolCall("ping", "{}")]


@hookimpl
def mlx_tool_parsers():
    yield ToolParser("silent", "<<", ">>", parse, lambda template: "<<" in template)
"""
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }} as OPENER
{% endfor -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
GREP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "pattern": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "modes": {"type": "array", "items": {"enum": ["all", "first"]}, "maxItems": 2},
    },
    "required": ["pattern", "count", "modes"],
    "additionalProperties": False,
}
PING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"grep": GREP, "ping": PING}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
Install = Callable[..., str]


@pytest.fixture
def stranger(
    install_plugin: Install, make_service: Any, build_tiny: Any, tiny_class: Any
) -> Callable[[str, str], Any]:
    """A tiny model whose chat template uses the format of a third-party plugin."""

    def make(source: str, opener: str) -> Any:
        install_plugin("mlx-provider-stranger", source)
        folder = build_tiny("qwen3", TEMPLATE.replace("OPENER", opener))
        service, client = make_service()
        return tiny_class(client, service, str(folder))

    return make


@pytest.mark.parametrize(
    ("source", "opener"),
    [
        (ANGLE.read_text(encoding="utf-8"), "<call>"),
        (COMMAND_A.read_text(encoding="utf-8"), "<|START_ACTION|>"),
        (TAGS, "<<"),
    ],
    ids=["json", "streamed json", "tags"],
)
def test_a_required_call_of_a_strict_tool_is_valid(stranger: Any, source: str, opener: str) -> None:
    model = stranger(source, opener)
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
    wide = partial(Sampling, temperature=1, top_p=1, top_k=-1)  # so that both tools are drawn
    started = [model.start(**asked, sampling=wide(seed=seed)) for seed in range(4, 10)]
    whole, names = 0, set()
    for answer in map(model.read, started):
        assert answer.warnings == []
        if answer.only.reason == "length":
            continue
        assert answer.only.reason == "tool_calls"
        assert answer.only.content.strip() == ""
        for name, arguments in answer.only.arguments:
            jsonschema.validate(arguments, SCHEMAS[name])
            names.add(name)
        whole += 1
    assert whole >= 5
    assert names == {"grep", "ping"}
    named = {"type": "function", "function": {"name": "ping"}}
    assert model.ask(**asked | {"tool_choice": named}).only.arguments == [("ping", {})]


def test_a_format_without_a_grammar_or_json_is_refused(stranger: Any) -> None:
    model = stranger(SILENT, "<<")
    with pytest.raises(BadRequest, match=r"'grep' cannot be enforced.*silent") as refused:
        model.start(tools=TOOLS, tool_choice="required")
    assert refused.value.param == "tools"
    assert model.ask(tools=TOOLS, max_tokens=2).only.calls == []
