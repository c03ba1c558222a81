"""Structured output end to end: a model with random weights writes valid output."""

import json
import re
from typing import Any

import jsonschema
import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.requests import Sampling

NODE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"anyOf": [{"const": "dir"}, {"const": "file"}, {"type": "null"}]},
        "size": {"type": ["integer", "null"], "minimum": 0, "maximum": 999},
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 1},
    },
    "required": ["name", "kind", "size", "children"],
    "additionalProperties": False,
}
TREE: dict[str, Any] = {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


GREP = function(
    "grep",
    {
        "type": "object",
        "properties": {
            "pattern": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["pattern"],
        "additionalProperties": False,
    },
)
SAVE = function("save_tree", {"type": "object", **TREE}, strict=True)
PING = function("ping")
TOOLS = [GREP, SAVE, PING]
SCHEMAS = {
    tool["function"]["name"]: tool["function"]["parameters"] or {"maxProperties": 0}
    for tool in TOOLS
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


def warm(seed: int) -> Sampling:
    return Sampling(temperature=1, seed=seed)


def valid_calls(choice: Any, names: set[str]) -> None:
    assert choice.reason == "tool_calls"
    assert choice.content.strip() == ""
    for name, arguments in choice.arguments:
        assert name in names
        jsonschema.validate(arguments, SCHEMAS[name])


def valid_tree(choice: Any) -> None:
    assert choice.reason == "stop"
    jsonschema.validate(json.loads(choice.content), TREE)


def valid_object(choice: Any) -> None:
    assert choice.reason == "stop"
    assert isinstance(json.loads(choice.content), dict)


def valid_match(choice: Any) -> None:
    assert choice.reason == "stop"
    assert re.fullmatch("(yes|no), [a-f]{3,9}!", choice.content)


def valid_sum(choice: Any) -> None:
    assert choice.reason == "stop"
    assert re.fullmatch(r"\d{1,2}( \+ \d{1,2}){0,4}", choice.content)


NAMED = {"type": "function", "function": {"name": "save_tree"}}
LARK = 'start: NUMBER (" + " NUMBER){0,4}\nNUMBER: /[0-9]{1,2}/'
KINDS: list[tuple[dict[str, Any], Any]] = [
    (
        {"tools": TOOLS, "tool_choice": "required"},
        lambda choice: valid_calls(choice, {"grep", "save_tree", "ping"}),
    ),
    ({"tools": TOOLS, "tool_choice": NAMED}, lambda choice: valid_calls(choice, {"save_tree"})),
    ({"response_format": json_schema(TREE)}, valid_tree),
    ({"response_format": {"type": "json_object"}}, valid_object),
    ({"grammar": {"type": "regex", "value": "(yes|no), [a-f]{3,9}!"}}, valid_match),
    ({"grammar": {"type": "lark", "value": LARK}}, valid_sum),
]


@pytest.fixture
def narrow(own_model: Any, qwen: Any) -> Any:
    """The same model with few rows in a batch."""
    return own_model(qwen.model, max_rows=12)


@pytest.mark.parametrize("rows", [12, pytest.param(40, marks=pytest.mark.sweep)])
def test_many_constrained_rows_are_valid_and_do_not_change_free_rows(
    narrow: Any, rows: int
) -> None:
    """Each is valid, or is reported as cut; other rows do not change."""
    free = {"logprobs": True, "max_tokens": 30}
    alone = [narrow.ask(f"Word {i}", **free).only.tokens for i in range(4)]
    beside = [narrow.start(f"Word {i}", **free) for i in range(4)]
    started = []
    for seed in range(rows):
        given, check = KINDS[seed % len(KINDS)]
        asked = {**given, "sampling": warm(seed), "max_tokens": 200}
        started.append((check, narrow.start(f"Run {seed}", **asked)))
    assert [narrow.read(each).only.tokens for each in beside] == alone
    whole = 0
    for check, generation in started:
        choice = narrow.read(generation).only
        if choice.reason == "length":
            continue
        check(choice)
        whole += 1
    assert whole >= 0.75 * rows


@pytest.mark.parametrize("limit", [1, 5, 12, 20])
def test_a_cut_call_is_not_reported_as_complete(qwen: Any, limit: int) -> None:
    choice = qwen.ask(tools=[SAVE], tool_choice="required", max_tokens=limit).only
    assert choice.reason == "length"
    for name, text in choice.calls:
        assert name == "save_tree"
        with pytest.raises(ValueError, match=r"."):
            json.loads(text)


def test_a_stop_string_cuts_an_answer(qwen: Any) -> None:
    given = {"response_format": json_schema(TREE), "max_tokens": 400, "sampling": warm(1)}
    whole = qwen.ask(**given).only
    assert whole.reason == "stop"
    cut = qwen.ask(**given, stop=['"kind"']).only
    assert cut.reason == "stop"
    assert cut.content == whole.content.split('"kind"')[0]


def test_a_stop_string_inside_arguments_cuts_nothing(qwen: Any) -> None:
    given = {"tools": [SAVE], "tool_choice": "required", "sampling": warm(3), "max_tokens": 600}
    whole = qwen.ask(**given).only
    valid_calls(whole, {"save_tree"})
    assert qwen.ask(**given, stop=['"kind"', "tool_call"]).only.calls == whole.calls


def test_one_call_if_parallel_calls_are_off(qwen: Any) -> None:
    several = 0
    for seed in range(6):
        given = {"tools": [PING], "tool_choice": "required", "sampling": warm(seed)}
        one = qwen.ask(**given, parallel_tool_calls=False, max_tokens=400).only
        assert one.arguments == [("ping", {})]
        assert one.reason == "tool_calls"
        several += len(qwen.ask(**given, max_tokens=400).only.calls) > 1
    assert several


def test_tool_choice_none_gives_no_tools_in_the_prompt_and_no_calls(qwen: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    shown = qwen.prompt_of(messages=messages, tools=[GREP])
    hidden = qwen.prompt_of(messages=messages, tools=[GREP], tool_choice="none")
    assert "grep" in shown
    assert hidden == qwen.prompt_of(messages=messages)
    # a call is text then
    lark = 'start: <tool_call> "\\n{\\"name\\": \\"ping\\"}\\n" </tool_call>'
    given = {"grammar": {"type": "lark", "value": lark}, "tools": [PING], "max_tokens": 60}
    none = qwen.ask(**given, tool_choice="none").only
    assert none.calls == []
    assert none.content == '<tool_call>\n{"name": "ping"}\n</tool_call>'
    assert none.reason == "stop"
    called = qwen.ask(**given, tool_choice="auto").only
    assert called.calls == [["ping", "{}"]]
    assert called.reason == "tool_calls"


def test_each_of_several_choices_follows_the_grammar(qwen: Any) -> None:
    given = {"response_format": json_schema(TREE), "n": 3, "max_tokens": 2000}
    answer = qwen.ask(**given, sampling=warm(7))
    for choice in answer.choices:
        valid_tree(choice)
    assert len({choice.content for choice in answer.choices}) > 1
    calls = qwen.ask(tools=TOOLS, tool_choice="required", n=3, max_tokens=2000, sampling=warm(8),
                     parallel_tool_calls=False)  # fmt: skip
    for choice in calls.choices:
        valid_calls(choice, {"grep", "save_tree", "ping"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"response_format": json_schema({"properties": {"a": {"not": {"type": "null"}}}})},
            ["'not'", "#/properties/a", "response_format"],
        ),
        (
            {
                "tools": [
                    PING,
                    function(
                        "f",
                        {"properties": {"b": {"type": "array", "uniqueItems": True}}},
                        strict=True,
                    ),
                ],
                "tool_choice": "required",
            },
            ["'uniqueItems'", "#/properties/b", "tools[1].function.parameters"],
        ),
        ({"tools": [PING], "tool_choice": {"type": "function", "name": "pong"}}, ["'pong'"]),
        ({"tool_choice": "required"}, ["tool_choice"]),
        ({"response_format": {"type": "yaml"}}, ["'yaml'", "json_schema"]),
        ({"grammar": {"type": "regex", "value": "(a"}}, ["grammar"]),
        ({"grammar": {"type": "lark", "value": "begin: 'a'"}}, ["grammar"]),
    ],
)
def test_a_constraint_that_cannot_be_enforced_is_refused_by_name(
    qwen: Any, given: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(BadRequest) as refused:
        qwen.start(**given)
    for word in words:
        assert word in refused.value.message


def test_no_logprob_is_lost_in_a_call(qwen: Any) -> None:
    given = {"tools": TOOLS, "tool_choice": "required", "sampling": warm(5), "max_tokens": 900}
    answer = qwen.ask(**given, logprobs=True, top_logprobs=2)
    choice = answer.only
    valid_calls(choice, {"grep", "save_tree", "ping"})
    ended = answer.usage.completion_tokens - len(choice.tokens)
    assert ended in (0, 1), "only the token that ends the reply has none"
    written = "".join(each.token for each in choice.logprobs)
    assert written.lstrip().startswith("<tool_call>\n{")
    assert all(len(each.top) == 2 for each in choice.logprobs)
