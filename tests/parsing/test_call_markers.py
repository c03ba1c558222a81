"""What marks a call before its tool is named, in every format, and that the call is predicted."""

import pytest

from byte_model import ENDS, byte_tokenizer
from mlx_provider.chat.constraints.call_text import CallMatchers, CallPredictor, call_marker
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.protocol.requests import GenerateRequest

from .conftest import TOOL_PARSERS

MARKERS = {
    "apertus": "<|tools_prefix|>",
    "auto": "<tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "dots": "<dots_function_call>",
    "functiongemma": "<start_function_call>",
    "gemma4": "<|tool_call>",
    "gigachat3": "<|function_call|>",
    "glm47": "<tool_call>",
    "granite": "<|tool_call|>",
    "harmony": "<|channel|>commentary to=functions.",
    "hermes": "<tool_call>",
    "hy_v3": "<tool_calls>",
    "hy_v3_opensource": "<tool_calls:opensource>",
    "internlm": "<|action_start|><|plugin|>",
    "jamba": "<tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "lfm2": "<|tool_call_start|>",
    "llama3_json": '{"name": "',
    "longcat": "<longcat_tool_call>",
    "minicpm5": "<function name=",
    "minimax_m2": "<minimax:tool_call>",
    "mistral": "[TOOL_CALLS]",
    "mistral_args": "[TOOL_CALLS]",
    "mistral_call_id": "[TOOL_CALLS]",
    "mistral_ids": "[TOOL_CALLS]",
    "muse": "<atem:function_calls>",
    "nemotron": "<tool_call>",
    "nemotron_json": "<TOOLCALL>",
    "olmo3": "<function_calls>",
    "phi4_mini_json": "functools[",
    "poolside_v1": "<tool_call>",
    "qwen": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "seed_oss": "<seed:tool_call>",
    "xlam": '[{"name": "',
}
UNMARKED = {"llama4_pythonic"}
"""Their calls begin with one bracket."""
TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, [TOKENIZER.token_to_id(end) for end in ENDS], 384)
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
    "required": ["path", "lines"],
}
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}


def test_every_format_has_its_known_call_marker_or_none() -> None:
    found = {parser.name: call_marker(parser) for parser in TOOL_PARSERS.values()}
    assert {name for name, marker in found.items() if not marker} == UNMARKED
    assert {name: marker for name, marker in found.items() if marker} == MARKERS


@pytest.mark.parametrize("name", MARKERS)
def test_a_call_of_each_format_is_predicted(name: str) -> None:
    parser = TOOL_PARSERS[name]
    asked = GenerateRequest(model="m", tools=[TOOL])
    predictor = CallPredictor(CallMatchers(COMPILER, asked, parser))
    grammar = parser.call_grammar()
    text = grammar.write("read_file", {"path": "a.py", "lines": 12}, SCHEMA)
    ids = TOKENIZER.encode(f"I read. {text}", add_special_tokens=False).ids
    right = 0
    for token in ids:
        right += predictor.likely()[:1] == [token]
        predictor.advance(token)
    written = TOKENIZER.encode(text.partition(MARKERS[name])[2], add_special_tokens=False).ids
    assert right > 0.6 * len(written)
