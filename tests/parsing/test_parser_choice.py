"""Which parsers a chat template chooses. The snippets are what real templates contain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from .conftest import REASONING_PARSERS, TOOL_PARSERS

THINK = "{{- '<think>\\n\\n</think>\\n\\n' }}"
QWEN3 = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
CODER = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>"
GLM = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>"


def chosen(parsers: Mapping[str, Any], template: str) -> str | None:
    found = [parser for parser in parsers.values() if parser.detect(template)]
    return max(found, key=lambda parser: parser.rank).name if found else None


@pytest.mark.parametrize(
    ("template", "tool_parser", "reasoning_parser"),
    [
        ("{{ message.content }}", None, None),
        (QWEN3, "hermes", None),
        (QWEN3 + THINK, "hermes", "qwen3"),
        (CODER, "qwen3_coder", None),
        (CODER + THINK, "qwen3_coder", "qwen3"),
        (GLM + THINK, "glm47", "glm4"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a> <seed:think>", "seed_oss", "seed_oss"),
        ("<minimax:tool_call>\n<invoke name= <think>", "minimax_m2", "minimax_m2"),
        ("{'<｜tool▁sep｜>' + name + '\\n```json\\n'} <｜Assistant｜>", "deepseek_v3", None),
        ("<｜Assistant｜><think>\\n <｜tool▁sep｜> ```json", "deepseek_v3", "deepseek_r1"),
        ("{'<｜tool▁sep｜>'} <｜Assistant｜> {% if thinking %}", "deepseek_v31", "deepseek_v3"),
        ("<｜DSML｜function_calls>", "deepseek_v32", None),
        ("<｜DSML｜tool_calls>", "deepseek_v4", "deepseek_v4"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("<|python_tag|> {'name': , 'parameters': }", "llama3_json", None),
        ("<|python_start|> <|python_end|>", "llama4_pythonic", None),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral", "mistral"),
        ("<|tool_calls_section_begin|> <|im_middle|> <think>", "kimi_k2", "kimi_k2"),
        ("<|tool_call>call: <|channel>thought", "gemma4", "gemma4"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<|tool_call|> granite", "granite", None),
        ("<TOOLCALL>[", "nemotron_json", None),
        ("<|tool_call_start|>[", "lfm2", None),
        ("<function_calls>", "olmo3", None),
        ("<|tools_prefix|>[", "apertus", None),
        ("<longcat_tool_call>", "longcat", None),
        ("<function name= <param name=", "minicpm5", None),
        ("<|action_start|><|plugin|>", "internlm", None),
    ],
)
def test_a_template_chooses(
    template: str, tool_parser: str | None, reasoning_parser: str | None
) -> None:
    assert chosen(TOOL_PARSERS, template) == tool_parser
    assert chosen(REASONING_PARSERS, template) == reasoning_parser


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("qwen3_xml", "qwen3_coder"),
        ("llama", "llama3_json"),
        ("gpt-oss", "harmony"),
        ("dsml", "deepseek_v4"),
        ("function_gemma", "functiongemma"),
        ("phi4", "phi4_mini_json"),
        ("hunyuan", "jamba"),
        ("ernie45", "hermes"),
    ],
)
def test_names_that_others_use(alias: str, name: str) -> None:
    assert TOOL_PARSERS[alias].name == name


def test_no_name_is_taken_twice() -> None:
    for parsers in (TOOL_PARSERS, REASONING_PARSERS):
        owned: dict[str, str] = {}
        for parser in {id(parser): parser for parser in parsers.values()}.values():
            for name in (parser.name, *parser.aliases):
                assert owned.setdefault(name, parser.name) == parser.name
