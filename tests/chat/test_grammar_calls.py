"""Tool calls forced by a grammar, in every format, and read back by the real parsers."""

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from byte_model import GREP, MOVE, read
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.chat.constraints.patterns import whole_text
from mlx_provider.chat.constraints.schema import INDENTED, ONE_LINE, Whitespace
from mlx_provider.chat.output.whole_reply import read_chunks
from mlx_provider.errors import BadRequest
from mlx_provider.records import CallGrammar, ToolCall, ToolParser
from mlx_provider.serving.structure import check_readable
from mlx_provider.testing.conformance.calls import PING, PUT, TREE, function
from mlx_provider_tool_parsers import mlx_tool_parsers


@cache
def parsers() -> dict[str, ToolParser]:
    return {
        name: parser for parser in mlx_tool_parsers() for name in (*parser.aliases, parser.name)
    }


def grammar(name: str) -> CallGrammar:
    return parsers()[name].call_grammar()


FORMATS = sorted(parser.name for parser in mlx_tool_parsers())

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


SAVE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "grep_tree", "strict": True, "parameters": TREE | {"type": "object"}},
}
TOOLS = [GREP, SAVE, PING]


def hermes_calls(text: str) -> list[dict[str, Any]]:
    calls = text.split("<tool_call>\n")[1:]
    return [json.loads(call.split("\n</tool_call>")[0]) for call in calls]


def check_call(call: dict[str, Any]) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in TOOLS}
    assert call["name"] in schemas
    schema = schemas[call["name"]] or {"maxProperties": 0}
    jsonschema.validate(call["arguments"], schema)


def test_random_model_makes_a_required_call_200_times(model: Any) -> None:
    first = model.start(grammar("hermes"), tools=TOOLS, tool_choice="required")
    ended, several, names = 0, 0, set()
    for seed in range(200):
        text, done = model.sample(first.fork(), seed, 900)
        if not done:
            continue
        ended += 1
        calls = hermes_calls(text)
        assert text.startswith("<tool_call>\n")
        assert calls
        for call in calls:
            check_call(call)
            names.add(call["name"])
        several += len(calls) > 1
    assert ended >= 190
    assert several
    assert names == {"grep", "grep_tree", "ping"}


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "grep"}}}, {"grep"}),
        ({"tool_choice": {"type": "function", "name": "ping"}}, {"ping"}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"grep", "grep_tree", "ping"}),
    ],
)
def test_grammar_ends_after_single_call(model: Any, given: dict[str, Any], names: set[str]) -> None:
    first = model.start(grammar("hermes"), tools=TOOLS, **given)
    found = set()
    for seed in range(40):
        text, done = model.sample(first.fork(), seed, 900)
        assert done
        (call,) = hermes_calls(text)
        check_call(call)
        found.add(call["name"])
    assert found == names


def test_allowed_tools_limits_the_calls_to_the_listed_tools(model: Any) -> None:
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "name": "ping"}]},
    }
    first = model.start(grammar("hermes"), tools=TOOLS, tool_choice=choice)
    text, _ = model.sample(first, 1, 400)
    assert {call["name"] for call in hermes_calls(text)} == {"ping"}


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
def test_lists_of_many_and_odd_values_are_enforced(model: Any, name: str) -> None:
    words = ["", "a\x7fb", 'x\n"/', *map("v{}".format, range(2100)), *range(2100)]
    tool = function("pick", "word", word={"enum": words})
    first = model.start(grammar(name), tools=[tool], tool_choice="required")
    for word in (*words[:4], words[-1], "v", "v2100"):
        text = grammar(name).write("pick", {"word": word}, tool["function"]["parameters"])
        assert model.accepts(first.fork(), text) == (word in words), word


def test_markers_are_written_as_special_tokens(model: Any) -> None:
    constraint = model.start(grammar("hermes"), tools=TOOLS, tool_choice="required")
    assert model.allowed_tokens(constraint) == [model.tokenizer.token_to_id("<tool_call>")]


def test_markers_outside_the_vocabulary_are_written_as_text(model: Any) -> None:
    constraint = model.start(grammar("longcat"), tools=[PING], tool_choice="required")
    text = '<longcat_tool_call>\n{"name": "ping", "arguments": {}}\n</longcat_tool_call>'
    assert model.accepts(constraint, text)


FORMS: list[tuple[str, str]] = [
    ("hermes", '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'),
    ("llama3_json", '{"name": "ping", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "ping", "arguments": {}}]'),
    ("mistral_args", "[TOOL_CALLS]ping[ARGS]{}"),
    ("mistral_args", "[TOOL_CALLS]ping[ARGS]{}[TOOL_CALLS]ping[ARGS]{}"),
    ("mistral", '[TOOL_CALLS][{"name": "ping", "arguments": {}}, '
     '{"name": "ping", "arguments": {}}]'),
    ("mistral_ids", '[TOOL_CALLS][{"name": "ping", "arguments": {}, "id": "abcDEF123"}, '
     '{"name": "ping", "arguments": {}, "id": "000000000"}]'),
    ("mistral_call_id", "[TOOL_CALLS]ping[CALL_ID]abcDEF123[ARGS]{}"
     "[TOOL_CALLS]ping[CALL_ID]000000000[ARGS]{}"),
    ("qwen3_coder", "<tool_call>\n<function=ping>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=grep>\n<parameter=pattern>\nabc\n</parameter>\n"
     "<parameter=mode>\nall\n</parameter>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=grep>\n<parameter=pattern>\nabc\n</parameter>\n"
     "<parameter=count>\n7\n</parameter>\n<parameter=mode>\nfirst\n</parameter>\n</function>\n"
     "</tool_call>"),
    ("glm45", "<tool_call>grep\n<arg_key>pattern</arg_key>\n<arg_value>abc</arg_value>\n"
     "<arg_key>mode</arg_key>\n<arg_value>all</arg_value>\n</tool_call>"),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>'),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>{}"
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.ping:0"
     "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), FORMS)
def test_each_format_grammar_accepts_only_its_own_calls(model: Any, name: str, text: str) -> None:
    given: dict[str, Any] = {"tools": [GREP, PING], "tool_choice": "required"}
    assert model.accepts(model.start(grammar(name), **given), text)
    assert not model.accepts(model.start(grammar(name), **given), text.replace("ping", "pong", 1)
                       .replace("grep", "grab", 1))  # fmt: skip
    assert not model.accepts(model.start(grammar(name), **given), "no call")


@pytest.mark.parametrize("name", ["mistral_ids", "mistral_call_id"])
def test_the_grammar_demands_call_ids_of_nine_letters_or_digits(model: Any, name: str) -> None:
    first = model.start(grammar(name), tools=[PING], tool_choice="required")
    text = grammar(name).write_all([("ping", {}, {})], ["abcDEF123"])
    for made, fits in (("Zz9Zz9Zz9", True), ("", False), ("Zz9Zz9Zz", False), ("Zz9_Zz9Zz", False)):
        assert model.accepts(first.fork(), text.replace("abcDEF123", made)) == fits


@pytest.mark.parametrize("name", FORMATS)
def test_random_model_ends_its_call_in_every_format(model: Any, name: str) -> None:
    first = model.start(grammar(name), tools=[GREP, PING], tool_choice="required",
                    parallel_tool_calls=False)  # fmt: skip
    ends = [model.sample(first.fork(), seed, 700)[1] for seed in range(10)]
    assert all(ends)


def test_a_format_without_a_grammar_writes_json_between_its_markers(model: Any) -> None:
    strange = ToolParser("strange", "<call>", "</call>").call_grammar()
    constraint = model.start(strange, tools=[PING], tool_choice="required")
    assert model.accepts(constraint, '<call>\n{"name": "ping", "arguments": {}}\n</call>')
    assert grammar("nous") is grammar("hermes")


XML_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "put",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "short": {"type": "string", "minLength": 2, "maxLength": 3},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "tree": {"$ref": "#/$defs/Node"},
                "flags": {"type": "array", "items": {"type": "boolean"}},
            },
            "required": ["text"],
            "$defs": TREE["$defs"],
        },
    },
}


def parameter(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (parameter("text", "a\n<b>\n"), True),
        (parameter("text", ""), True),
        (parameter("text", "a") + parameter("short", "ab"), True),
        (parameter("text", "a") + parameter("short", "a"), False),
        (parameter("text", "a") + parameter("short", "abcd"), False),
        (parameter("text", "a") + parameter("maybe", "null"), True),
        (parameter("text", "a") + parameter("flags", "[true, false]"), True),
        (parameter("text", "a") + parameter("flags", "yes"), False),
        (parameter("text", "a") + parameter("tree", '{"kind":null,"size":1,"children":[]}'), True),
        (parameter("text", "a") + parameter("tree", '{"kind":"x","size":1,"children":[]}'), False),
        (parameter("short", "ab"), False),
        ("", False),
    ],
)
def test_tagged_arguments_follow_their_schema(model: Any, body: str, fits: bool) -> None:
    given: dict[str, Any] = {"tools": [XML_TOOL], "tool_choice": "required"}
    text = f"<tool_call>\n<function=put>\n{body}</function>\n</tool_call>"
    assert model.accepts(model.start(grammar("qwen3_coder"), **given), text) is fits


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


def test_an_unsupported_keyword_refuses_a_strict_tool_and_warns_for_another(model: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(BadRequest, match=r"tools\[0\]\.function\.parameters: 'uniqueItems' at #/p"):
        model.compiler.structure(
            model.request(tools=[tool(schema, strict=True)], tool_choice="required"),
            grammar("hermes"),
        )
    structure = model.compiler.structure(
        model.request(tools=[tool(schema)], tool_choice="required"), grammar("hermes")
    )
    assert "uniqueItems" in structure.warnings[0]


def test_a_tool_schema_that_does_not_compile_permits_any_object_with_a_warning(model: Any) -> None:
    broken = {"properties": {"a": {"$ref": "#/$defs/none"}}}
    structure = model.compiler.structure(
        model.request(tools=[tool(broken)], tool_choice="required"), grammar("hermes")
    )
    assert "not enforced" in structure.warnings[0]
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>'
    assert model.accepts(structure.constraint, text)


def test_parameters_must_be_an_object(model: Any) -> None:
    with pytest.raises(BadRequest, match="must be a schema of type object"):
        model.compiler.structure(
            model.request(tools=[tool({"type": "string"})], tool_choice="required")
        )


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "qwen3_coder"])
def test_a_schema_with_tools_permits_an_answer_or_a_call(model: Any, name: str) -> None:
    given: dict[str, Any] = {"tools": [GREP, PING], "response_format": json_schema(POINT)}
    call = next(text for form, text in FORMS if form == name)
    assert model.accepts(model.start(grammar(name), **given), '{"x":1,"on":true}')
    assert model.accepts(model.start(grammar(name), **given), call)
    assert not model.accepts(model.start(grammar(name), **given), "free text")


@pytest.mark.parametrize(
    ("name", "tight"),
    [
        ("llama3_json", '{"name":"ping","parameters":{}}'),
        ("xlam", '[{"name":"ping","arguments":{}},{"name":"ping","arguments":{}}]'),
    ],
)
@pytest.mark.parametrize("spaces", [ONE_LINE, INDENTED])
def test_a_call_without_markers_has_the_white_space_of_schema_json(
    model: Any, name: str, tight: str, spaces: Whitespace
) -> None:
    given: dict[str, Any] = {"tools": [PING], "response_format": json_schema(POINT)}
    compiler = GrammarCompiler(model.tokenizer, model.eos, model.rows, spaces=spaces)
    structure = compiler.structure(model.request(**given), grammar(name))
    assert structure is not None
    for text in (tight, json.dumps(json.loads(tight))):
        assert model.accepts(structure.constraint.fork(), text)


def test_tokens_of_several_characters_are_allowed_across_grammar_rules(model: Any) -> None:
    """Words of several characters pass where their bytes do, also across a rule's border."""
    constraint = model.start(grammar("hermes"), tools=[SAVE], tool_choice="required")
    text = (
        '<tool_call>\n{"name": "grep_tree", "arguments": {"kind": null, "size": 1, "children": []}}'
    )
    tokens: list[int] = model.encode(text)
    assert any(len(model.tokenizer.decode([token])) > 1 for token in tokens)
    for token in tokens:
        assert token in model.allowed_tokens(constraint)
        constraint.advance(token)


@pytest.mark.parametrize("name", FORMATS)
def test_parsers_read_what_the_grammar_writes(model: Any, name: str) -> None:
    tools = [GREP, PING, PUT, MOVE]
    schemas = {t["function"]["name"]: t["function"].get("parameters", True) for t in tools}
    parser = parsers()[name]
    first = model.start(grammar(name), tools=tools, tool_choice="required")
    seen = 0
    for seed in range(10):
        text, done = model.sample(first.fork(), seed, 600)
        if done:
            calls, content = read(text, parser, tools)
            assert calls, text
            assert content == "", text
            for called, arguments in calls:
                jsonschema.validate(arguments, schemas[called])
            seen += 1
    assert seen >= 3


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("^a$", "a"),
        ("a", "(?s:.*)a(?s:.*)"),
        ("^a", "a(?s:.*)"),
        (r"a\$", r"(?s:.*)a\$(?s:.*)"),
        ("^(a|b)$", "(a|b)"),
        ("^[|^$]$", "[|^$]"),
        ("^a/b$", r"a\/b"),
        (r"^a\/b$", r"a\/b"),
        ("^a|b$", None),
        ("a^b", None),
        ("(a$|b)", None),
        ("(?=a)b", None),
        ("(?:a)", "(?s:.*)(?:a)(?s:.*)"),
    ],
)
def test_a_search_pattern_becomes_one_of_the_whole_text(pattern: str, whole: str | None) -> None:
    assert whole_text(pattern) == whole


def test_a_tagged_format_warns_of_keywords_that_it_cannot_enforce(model: Any) -> None:
    schema = {"properties": {"a": {"type": "string", "format": "date"}}, "required": ["a"]}
    asked = model.request(tools=[tool(schema, strict=True)], tool_choice="required")
    tagged = model.compiler.structure(asked, grammar("qwen3_coder"))
    assert "format 'date' is not enforced" in tagged.warnings[0]
    assert model.compiler.structure(asked, grammar("hermes")).warnings == ()


@pytest.mark.parametrize("name", FORMATS)
def test_every_parser_reads_an_empty_call(name: str) -> None:
    parser = parsers()[name]
    text = grammar(name).write("ping", {}, {})
    assert read_chunks([text], tool_parser=parser).calls == (("ping", "{}"),)


@pytest.mark.parametrize("name", ["llama4_pythonic", "lfm2", "olmo3"])
def test_a_name_that_the_format_cannot_write_is_refused(model: Any, name: str) -> None:
    dashed = {"type": "function", "function": {"name": "get-it"}}
    parser = parsers()[name]
    asked = model.request(tools=[dashed, PING], tool_choice="required")
    with pytest.raises(BadRequest, match=rf"'get-it' cannot be enforced.*{name}"):
        check_readable(asked, parser)
    named = {"type": "function", "function": {"name": "ping"}}
    check_readable(model.request(tools=[dashed, PING], tool_choice=named), parser)


def test_a_third_party_format_that_is_not_json_cannot_have_forced_calls(model: Any) -> None:
    def parse(text: str, tools: Any) -> list[ToolCall]:
        if not text.startswith("!"):
            raise ValueError("no call")
        return [ToolCall(text[1:], "{}")]

    strange = ToolParser(name="strange", start="<<", end=">>", parse=parse)
    asked = model.request(tools=[PING], tool_choice="required")
    with pytest.raises(BadRequest, match="strange"):
        check_readable(asked, strange)
