"""Small inputs of any size and shape: a 400 that names the part, in bounded time."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.bounds import MAX_MESSAGES, MAX_TOKEN_IDS, MAX_TOOLS
from mlx_provider.chat.constraints.request import demanded_names, response_schema
from mlx_provider.chat.constraints.schema import SchemaReader
from mlx_provider.errors import LONGEST, BadRequest
from mlx_provider.litellm.call import Call, generate_requests
from mlx_provider.litellm.fit import fit_chat
from mlx_provider.protocol.requests import GenerateRequest, ModelOptions
from mlx_provider.server.incoming import parse_request
from mlx_provider.wire.anthropic.request import CHAT_ONLY, message_request
from mlx_provider.wire.openai.request import Parameters, constraint
from mlx_provider.wire.responses.routes import response_request

HI = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def posted(**fields: Any) -> GenerateRequest:
    """Straight to an engine."""
    return parse_request(
        GenerateRequest, json.dumps({"model": "m", "messages": [HI], **fields}).encode()
    )


def translated(messages: Any = None, **params: Any) -> GenerateRequest:
    """Through LiteLLM's handler."""
    given = [HI] if messages is None else messages
    call = Call({"model": "m", "messages": given, "optional_params": params, "logging_obj": None})
    (made,) = generate_requests(call)
    return made


def messaged(messages: Any = None, **params: Any) -> GenerateRequest:
    """By Anthropic's route."""
    given = {"max_tokens": 1, **params, "messages": [HI] if messages is None else messages}
    if "tools" in given:
        given["tools"] = [
            {"name": "f", "input_schema": tool["function"]} for tool in given["tools"]
        ]
    if "stop" in given:
        given["stop_sequences"] = given.pop("stop")
    return message_request(given, {"model": "m", "options": ModelOptions()})[0]


def responded(messages: Any = None, **params: Any) -> GenerateRequest:
    """By the route of OpenAI's Responses."""
    given = {**params, "input": [HI] if messages is None else messages}
    if "tools" in given:
        given["tools"] = [
            {"type": "function", "name": f"f{i}", "parameters": tool["function"]}
            for i, tool in enumerate(given["tools"])
        ]
    if "max_tokens" in given:
        given["max_output_tokens"] = given.pop("max_tokens")
    return response_request(given, {"model": "m", "options": ModelOptions()})[0]


NOT_OF_RESPONSES = {"response_format", "n"}
NOT_OF_MESSAGES = {*CHAT_ONLY, "tool_choice"}
ENTRIES = f"at most {MAX_TOKEN_IDS} entries are possible, got "
DEEP = {"properties": nested(150)}
SAME: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI] * 20_000}, f"messages: at most {MAX_MESSAGES} entries are possible"),
    ({"messages": [{"role": "user", "content": [PART] * 50_000}]}, "messages: holds more than"),
    ({"tools": [TOOL] * 5000}, f"tools: at most {MAX_TOOLS} entries are possible"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": DEEP}}]}, "tools: nested deeper"),
    ({"response_format": {"schema": nested(150)}}, "response_format: nested deeper than 100"),
    ({"tool_choice": {"x": nested(150)}}, "tool_choice: nested deeper than 100"),
    ({"stop_token_ids": list(range(100_000))}, f"stop_token_ids: {ENTRIES}100000"),
    ({"stop_token_ids": ["x"] * 100_000}, f"stop_token_ids: {ENTRIES}100000"),
    ({"n": 10**30}, "n: "),
    ({"max_tokens": 1.5}, "max_tokens: "),
]


@pytest.mark.parametrize(("fields", "words"), SAME)
def test_an_oversized_field_gets_the_same_message(fields: dict[str, Any], words: str) -> None:
    told = []
    ways = [posted, translated]
    ways += [] if fields.keys() & NOT_OF_MESSAGES else [messaged]
    ways += [] if fields.keys() & NOT_OF_RESPONSES else [responded]
    for way in ways:
        began = time.thread_time()
        with pytest.raises(BadRequest) as caught:
            way(**fields)
        assert time.thread_time() - began < 10
        told.append(caught.value.message)
    assert len({text.partition(": ")[2] for text in told}) == 1  # after the name
    assert told[0].startswith(words)


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {str(i): 1 for i in range(20_000)}}, f"logit_bias: {ENTRIES}20000"),
    ({"logit_bias": {str(i): "x" for i in range(20_000)}}, f"logit_bias: {ENTRIES}20000"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias: Input should be a finite number, got nan"),
    ({"temperature": float("nan")}, "temperature: Input should be a finite number, got nan"),
    ({"top_p": float("inf")}, "top_p: Input should be a finite number, got inf"),
    ({"seed": 2**64}, "seed: "),
    ({"seed": -(2**63) - 1}, "seed: "),
    ({"top_k": 2**64}, "top_k: "),
]


@pytest.mark.parametrize(("fields", "words"), SAMPLING)
def test_sampling_out_of_bounds_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        translated(**fields)
    assert caught.value.message.startswith(words)
    with pytest.raises(BadRequest) as caught:
        posted(sampling=fields)
    assert caught.value.message.startswith("sampling." + words.split(":", maxsplit=1)[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"messages": [{"role": "user", "content": [{**PART, "\udc00": "x"}]}]},
        {"tools": [{"type": "function", "function": {"name": "f\ud800"}}]},
        {"stop": ["\ud800"]},
        {"chat_template_kwargs": {"x": "\ud800"}},
    ],
)
@pytest.mark.parametrize("way", [translated, messaged, responded])
def test_a_lone_surrogate_is_refused(way: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"surrogate|unicode"):
        way(**fields)


def test_emoji_and_nul_characters_are_kept_as_text() -> None:
    content = "😀\0é" * 3
    assert translated([{"role": "user", "content": content}]).messages[0]["content"] == content


@pytest.mark.parametrize("model", ["", "a\0b", "x" * 5000])
def test_an_invalid_model_name_is_refused(model: str) -> None:
    with pytest.raises(BadRequest, match="model: "):
        posted(model=model)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"response_format": [1] * 1_000_000}, "response_format"),
        ({"grammar": nested(900)}, "grammar"),
        ({"reasoning_effort": nested(900)}, "reasoning_effort"),
        ({"reasoning_effort": ["x" * 1_000_000]}, "reasoning_effort"),
        ({"parallel_tool_calls": nested(900)}, "parallel_tool_calls"),
        ({"chat_template_kwargs": nested(900)}, "chat_template_kwargs"),
        ({"logit_bias": nested(900)}, "logit_bias"),
    ],
)
def test_an_error_message_shortens_the_invalid_value(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        translated(**fields)
    assert name in caught.value.message
    assert len(caught.value.message) < 300


def test_an_error_message_has_a_length_limit() -> None:
    assert len(BadRequest("x" * 1_000_000).message) == LONGEST + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_openai_params": 5},
        {"allowed_openai_params": ["top_k", 5]},
        {"additional_drop_params": 5},
        {"timeout": "soon"},
        {"timeout": [1]},
    ],
)
def test_parameters_that_break_litellm_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=min(wrong)):
        fit_chat({"messages": [HI], **wrong})


def test_valid_litellm_parameters_are_accepted() -> None:
    for right in ({"timeout": "5"}, {"timeout": 5}, {"allowed_openai_params": ["top_k"]}, {}):
        given = {"messages": [HI], **right}
        assert (fit_chat(given), given) == ([], {"messages": [HI], **right})


KEYS = st.sampled_from(
    "type properties $ref $defs anyOf items enum const format pattern propertyNames required "
    "minItems maxItems minimum exclusiveMinimum uniqueItems if allowed_tools tools mode function "
    "name schema json_schema additionalProperties unevaluatedProperties".split()
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "a", "#/x", "object", "date"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(KEYS, JSON, max_size=4))
def test_any_json_value_is_accepted_or_a_bad_request(value: dict[str, Any]) -> None:
    for read in (
        SchemaReader("here").read,
        SchemaReader("here", lenient=True).read,
        response_schema,
        lambda choice: demanded_names(posted(tool_choice=choice)),
        lambda choice: constraint(Parameters({"response_format": choice})),
    ):
        with suppress(BadRequest):
            read(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"format": []},
        {"propertyNames": {"pattern": []}},
        {"propertyNames": {"enum": 5}},
        {"properties": {"a": {"format": {}}}},
    ],
)
def test_schema_keywords_of_a_wrong_type_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        SchemaReader("here").read(schema)


@pytest.mark.parametrize("wrong", [5, True, {"a": 5}, [5]])
@pytest.mark.parametrize("part", ["summary", "content"])
def test_reasoning_items_of_a_wrong_type_are_refused_by_their_place(part: str, wrong: Any) -> None:
    with pytest.raises(BadRequest, match=rf"input\[1\]\.{part}"):
        responded([HI, {"type": "reasoning", part: wrong}])


@pytest.mark.parametrize("wrong", [[], {}, 5, [5]])
def test_a_part_type_that_is_no_text_is_refused(wrong: Any) -> None:
    image = {"type": "image", "source": {"type": wrong}}
    for way, part in ((messaged, image), (messaged, {"type": wrong}), (responded, {"type": wrong})):
        with pytest.raises(BadRequest):
            way([{"role": "user", "content": [part, PART]}])


def test_a_tool_choice_that_is_only_a_type_means_the_word() -> None:
    kinds = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
    assert {kind: posted(tool_choice={"type": kind}).tool_choice for kind in kinds} == kinds


def test_an_allowed_tools_choice_without_a_list_is_refused() -> None:
    for allowed in (5, {"tools": 5}, [1]):
        with pytest.raises(BadRequest, match="tool_choice"):
            demanded_names(posted(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
