"""An error names the parameter as the client has sent it, on each route."""

from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
from openai.types.completion_create_params import CompletionCreateParamsBase as Text
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from mlx_provider.bounds import MAX_STOPS

CHAT, TEXT, RESPONSES, MESSAGES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "messages")
)
LONG = "ab " * 4000
NOT = {"type": "object", "not": {}}
"""A schema that is not supported."""
STRICT = {"name": "look", "strict": True}
FUNCTION = {"type": "function", "function": {**STRICT, "parameters": NOT}}
GOOD = {"type": "function", "function": {"name": "good", "parameters": {"type": "object"}}}
MANY = ["x"] * (MAX_STOPS + 1)

NOT_OF_RESPONSES = ("max_tokens", "n", "stream_options")
SHARED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 3},
    "top_p": {"top_p": 2},
    "stream": {"stream": 1},
}
"""Wrong on every route, by the name that the error must have."""
OPENAI: dict[str, dict[str, Any]] = {
    **SHARED,
    "frequency_penalty": {"frequency_penalty": 3},
    "presence_penalty": {"presence_penalty": -3},
    "logit_bias": {"logit_bias": {"9999999": 1}},
    "seed": {"seed": "x"},
    "n": {"n": 0},
    "stop": {"stop": MANY},
    "stop_token_ids": {"stop_token_ids": [-1]},
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"min_tokens": 9, "max_tokens": 3},
    "stream_options": {"stream_options": 3},
    "thinking_budget": {"thinking_budget": -1},
    "grammar": {"grammar": "start: ("},
    "nonsense": {"nonsense": 1},
}
WRONG: dict[str, dict[str, dict[str, Any]]] = {
    CHAT: {
        **OPENAI,
        "audio": {"audio": {"voice": "x"}},
        "modalities": {"modalities": ["audio"]},
        "max_completion_tokens": {"max_completion_tokens": 0, "max_tokens": 5},
        "top_logprobs": {"top_logprobs": 30, "logprobs": True},
        "logprobs": {"logprobs": 3},
        "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": True}},
        "thinking": {"thinking": {"type": "x"}},
        "reasoning_effort": {"reasoning_effort": 3},
        "chat_template_kwargs": {"chat_template_kwargs": {"tools": []}},
        "parallel_tool_calls": {"parallel_tool_calls": "no"},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {}}},
        "tools[0]": {"tools": [{"type": "function"}], "tool_choice": "required"},
        "tools[0].function.parameters": {"tools": [FUNCTION], "tool_choice": "required"},
        "tools[1].function.parameters": {"tools": [GOOD, {"type": "function", "function": {
            "name": "x", "parameters": "x"}}]},
        "tool_choice": {"tools": [GOOD], "tool_choice": {"type": "function",
            "function": {"name": "x"}}},
        "functions": {"functions": [GOOD["function"]]},
        "function_call": {"function_call": "auto"},
        "messages": {"messages": [{"role": "user", "content": LONG}]},
        "messages[0].content": {"messages": [{"role": "user", "content": 3}]},
        "messages[0].role": {"messages": [{"role": "x", "content": "x"}]},
    },
    TEXT: {
        **OPENAI,
        "best_of": {"best_of": "x"},
        "suffix": {"suffix": "x"},
        "echo": {"echo": 1},
        "logprobs": {"logprobs": 30},
        "prompt": {"prompt": LONG},
        "prompt[1]": {"prompt": ["x", 3]},
        "messages": {"messages": []},
    },
    RESPONSES: {
        **{name: fields for name, fields in OPENAI.items() if name not in NOT_OF_RESPONSES},
        "min_tokens": {"min_tokens": 9, "max_output_tokens": 3},
        "max_output_tokens": {"max_output_tokens": 0},
        "n": {"n": 2},
        "max_tokens": {"max_tokens": 5},
        "max_completion_tokens": {"max_completion_tokens": 5},
        "messages": {"messages": []},
        "verbosity": {"verbosity": "low"},
        "top_logprobs": {"top_logprobs": 30},
        "include": {"include": 3},
        "background": {"background": True},
        "conversation": {"conversation": "c"},
        "previous_response_id": {"previous_response_id": "r"},
        "prompt": {"prompt": {"id": "p"}},
        "instructions": {"instructions": 3},
        "reasoning": {"reasoning": 3},
        "reasoning.effort": {"reasoning": {"effort": 3}},
        "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": -1}},
        "text": {"text": 3},
        "text.format": {"text": {"format": {"type": "json_schema", "schema": NOT}}},
        "text.format.type": {"text": {"format": {"type": "x"}}},
        "parallel_tool_calls": {"parallel_tool_calls": "no"},
        "tools": {"tools": False},
        "tools[0]": {"tools": [{"type": "x"}]},
        "tools[0].parameters": {"tools": [{"type": "function", "name": "x", "parameters": "x"}]},
        "tools[1].parameters": {"tools": [{"type": "web_search"}, {"type": "function", **STRICT,
            "parameters": NOT}], "tool_choice": "required"},
        "tools[0].tools[1].parameters": {"tools": [{"type": "namespace", "name": "n", "tools": [
            {"type": "function", "name": "good"},
            {"type": "function", **STRICT, "parameters": NOT}]}], "tool_choice": "required"},
        "tool_choice": {"tool_choice": {"type": "function", "name": "x"}},
        "input": {"input": LONG},
        "input[0].role": {"input": [{"role": "x", "content": "x"}]},
        "input[0].content": {"input": [{"role": "user", "content": 3}]},
    },
    MESSAGES: {
        **SHARED,
        "max_tokens": {"max_tokens": 0},
        "stop_sequences": {"stop_sequences": [""]},
        "system": {"system": 3},
        "metadata": {"metadata": 3},
        "output_config": {"output_config": 3},
        "output_config.effort": {"output_config": {"effort": 3}},
        "output_config.format": {"output_config": {"format": {"type": "json_schema",
            "schema": NOT}}},
        "output_format": {"output_format": {"type": "json_schema", "schema": NOT}},
        "output_format.schema": {"output_format": {"type": "json_schema"}},
        "messages[2].content[0].tool_use_id": {"messages": [{"role": "user", "content": "x"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": "x", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": 3, "content": "x"}]}]},
        "reasoning_effort": {"reasoning_effort": 3},
        "thinking.type": {"thinking": {"type": "x"}},
        "thinking.budget_tokens": {"thinking": {"type": "enabled", "budget_tokens": -1}},
        "tools[0].input_schema": {"tools": [{**STRICT, "input_schema": NOT}],
            "tool_choice": {"type": "any"}},
        "tools[0].name": {"tools": [{"name": 3}]},
        "tool_choice": {"tools": [{"name": "good", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice.type": {"tool_choice": {"type": "x"}},
        "tool_choice.name": {"tool_choice": {"type": "tool"}},
        "tool_choice.disable_parallel_tool_use": {"tool_choice": {"type": "any",
            "disable_parallel_tool_use": 3}},
        "messages[0].content": {"messages": [{"role": "user", "content": 3}]},
        "messages[0].role": {"messages": [{"role": "x", "content": "x"}]},
        "seed": {"seed": "x"},
        "nonsense": {"nonsense": 1},
    },
}  # fmt: skip
"""Wrong parameters of each route, by the name that the error must have."""
SENT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    TEXT: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}
CASES = [(path, name) for path, cases in WRONG.items() for name in cases]
OPEN = {
    CHAT: {"metadata", "model", "moderation", "prediction", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "user", "verbosity", "web_search_options"},
    TEXT: {"model", "user"},
    RESPONSES: {"access_programs", "background_options", "context_management", "image",
        "max_tool_calls", "metadata", "model", "moderation", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
        "store", "stream_options", "truncation", "user"},
    MESSAGES: {"cache_control", "container", "diagnostics", "inference_geo", "model",
        "service_tier", "speed", "user_profile_id", "workspace_id"},
}  # fmt: skip
"""Parameters that take any value, or are refused whole; the model has tests of its own."""


@pytest.mark.parametrize(("path", "name"), CASES)
def test_an_error_names_the_clients_parameter(engine: Any, path: str, name: str) -> None:
    body = {"model": engine.scripted, **SENT[path], **WRONG[path][name]}
    answer = engine.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if path != MESSAGES:
        assert error["param"] == name, error
    if name not in ("input", "messages", "prompt"):  # the prompt is too long
        assert name in error["message"], error


def test_every_sdk_parameter_has_an_error_case() -> None:
    from anthropic.types.message_create_params import MessageCreateParamsBase as Messages

    declared = {CHAT: Chat, TEXT: Text, RESPONSES: ResponseCreateParamsBase, MESSAGES: Messages}
    for path, parameters in declared.items():
        tried = {name.partition(".")[0].partition("[")[0] for name in WRONG[path]}
        assert parameters.__annotations__.keys() <= tried | OPEN[path], path
        assert not OPEN[path] & tried


def test_an_error_of_a_token_count_names_the_part_of_the_client(engine: Any) -> None:
    call = {"type": "tool_use", "id": "c", "name": "", "input": {}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}]
    body = {"model": engine.scripted, "system": "Be brief.", "messages": turns}
    answer = engine.http.post(f"{MESSAGES}/count_tokens", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[1].content[0] ")
