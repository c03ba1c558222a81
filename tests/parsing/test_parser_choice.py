"""Which parsers a chat template chooses. The snippets are what real templates contain."""

from collections.abc import Mapping
from typing import Any

import pytest

from mlx_provider.errors import BadRequest
from named_plugins import discover

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
        ("{% set ns = namespace(multi_step_tool=1) %}" + CODER + THINK, "qwen3_coder", "qwen3"),
        (GLM + THINK, "glm47", "glm4"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a> <seed:think>", "seed_oss", "seed_oss"),
        ("<think></think><tool_call>f<tool_sep>\n<arg_key>", "hy_v3", "hy_v3"),
        (
            "{% set s = ':opensource' %}{{ '<think{}><tool_sep{}><arg_key{}>' }}",
            *("hy_v3_opensource", "hy_v3_opensource"),
        ),
        ("<minimax:tool_call>\n<invoke name= <think>", "minimax_m2", "minimax_m2"),
        ("{'<｜tool▁sep｜>' + name + '\\n```json\\n'} <｜Assistant｜>", "deepseek_v3", None),
        ("<｜Assistant｜><think>\\n <｜tool▁sep｜> ```json", "deepseek_v3", "deepseek_r1"),
        ("{'<｜tool▁sep｜>'} <｜Assistant｜> {% if thinking %}", "deepseek_v31", "deepseek_v3"),
        ("<｜DSML｜function_calls>", "deepseek_v32", None),
        ("<｜DSML｜tool_calls>", "deepseek_v4", "deepseek_v4"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
        ("<|python_tag|> {'name': , 'parameters': }", "llama3_json", None),
        ('{"name": function name, "parameters": dictionary of argument}', "llama3_json", None),
        ("<|python_tag|> <function=example_function_name>", "llama3_json", None),
        ("<|python_start|> <|python_end|>", "llama4_pythonic", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("[TOOL_CALLS] [ARGS] [THINK]", "mistral_args", "mistral"),
        ("[TOOL_CALLS][ {{- ', \"id\": \"' + c.id + '\"}' }}", "mistral_ids", None),
        ("[TOOL_CALLS] [CALL_ID] [ARGS]", "mistral_call_id", None),
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
def test_the_parsers_are_chosen_by_the_chat_template(
    template: str, tool_parser: str | None, reasoning_parser: str | None
) -> None:
    assert chosen(TOOL_PARSERS, template) == tool_parser
    assert chosen(REASONING_PARSERS, template) == reasoning_parser


TOOL_NAMES = {
    "hermes": "hermes ernie45 nous",
    "mistral": "mistral",
    "llama3_json": "llama llama3 llama3_json llama4_json",
    "llama4_pythonic": "pythonic llama4_pythonic",
    "granite": "granite",
    "internlm": "internlm interns1",
    "jamba": "jamba hunyuan hunyuan_a13b",
    "xlam": "xlam",
    "minimax_m2": "minimax minimax_m2 minimax-m2",
    "phi4_mini_json": "phi4_mini_json phi4",
    "olmo3": "olmo3",
    "apertus": "apertus apertus2509",
    "deepseek_v3": "deepseek_v3 deepseekv3 deepseek-v3 deepseek_r1_0528 DeepSeek-R1",
    "deepseek_v31": "deepseek_v31 deepseekv31 deepseek-v3.1",
    "deepseek_v32": "deepseek_v32 deepseekv32",
    "deepseek_v4": "deepseek_v4 deepseekv4 dsml",
    "kimi_k2": "kimi_k2 kimi-k2",
    "glm47": "glm glm45 glm47 GLM-4.7",
    "qwen": "qwen qwen25 qwen2.5",
    "qwen3_coder": "qwen3_coder qwen3_xml qwen3_coder_xml qwen3coder Qwen3-Coder mimo step3p5",
    "seed_oss": "seed_oss seed-oss",
    "harmony": "openai gpt-oss gpt_oss",
    "gigachat3": "gigachat3",
    "longcat": "longcat",
    "functiongemma": "functiongemma function_gemma",
    "gemma4": "gemma4",
    "lfm2": "lfm2",
    "muse": "muse atem",
}
THOUGHT_NAMES = {
    "deepseek_r1": "deepseek-r1 deepseek_r1 deepseek_r1_0528 qwen3-thinking holo2",
    "deepseek_v3": "deepseek-v3 deepseek_v31",
    "qwen3": "qwen3 qwen olmo3 mimo interns1",
    "glm4": "glm glm45 glm47",
    "harmony": "gpt-oss gpt_oss openai_gptoss",
    "kimi_k2": "kimi kimi_k2",
    "step3p5": "step3 step3p5",
    "minimax_m2": "minimax minimax-m2",
    "minimax_m2_append": "minimax-append-think minimax_m2_append_think",
    "mistral": "mistral magistral",
    "granite": "granite",
    "hunyuan_a13b": "hunyuan_a13b",
    "seed_oss": "seed_oss",
    "ernie45": "ernie45",
    "nemotron_v3": "nemotron_3 nano_v3 super_v3",
    "gemma4": "gemma4",
}
REGISTRY = discover("tool_parsers", "reasoning_parsers")


def test_every_common_spelling_of_a_parser_name_is_known() -> None:
    for name, written in TOOL_NAMES.items():
        assert {REGISTRY.tool_parser(x).name for x in written.split()} == {name}
    for name, written in THOUGHT_NAMES.items():
        assert {REGISTRY.reasoning_parser(x).name for x in written.split()} == {name}


@pytest.mark.parametrize(
    ("written", "meant"), [("hermess", "hermes"), ("quen3-coder", "qwen3_coder"), ("glm48", "glm4")]
)
def test_an_unknown_parser_name_is_refused_with_similar_names(written: str, meant: str) -> None:
    with pytest.raises(BadRequest, match=f"{written}.* did you mean .*'{meant}") as caught:
        REGISTRY.tool_parser(written)
    assert caught.value.param == "tool_parser"
    with pytest.raises(BadRequest, match=r"is installed; \(installed: .*hermes"):
        REGISTRY.tool_parser("zzzzzzzz")


def test_no_parser_name_or_alias_belongs_to_two_parsers() -> None:
    for parsers in (TOOL_PARSERS, REASONING_PARSERS):
        owned: dict[str, str] = {}
        for parser in {id(parser): parser for parser in parsers.values()}.values():
            for name in (parser.name, *parser.aliases):
                assert owned.setdefault(name, parser.name) == parser.name
