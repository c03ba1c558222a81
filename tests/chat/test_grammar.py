"""Structured output over a byte-level vocabulary: what is accepted, refused, and forced."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError

from mlx_provider.chat.constraints.compiler import (
    AfterThoughts,
    GrammarCompiler,
    Structure,
    Thoughts,
)
from mlx_provider.chat.constraints.request import GrammarForm
from mlx_provider.chat.constraints.schema import ONE_LINE, choose_whitespace
from mlx_provider.errors import BadRequest, RequestFailed
from mlx_provider.records import CallGrammar, MessageGrammar

HERMES = CallGrammar.json("<tool_call>\n", "\n</tool_call>")
DATA = Path(__file__).parents[1] / "data" / "chat"
CASES = [json.loads(line) for line in (DATA / "json_schema.jsonl").read_text().splitlines()]


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


GRAMMAR_CASES = [c for c in CASES if c["kind"] in ("schema_accept", "schema_reject")]


@pytest.mark.parametrize("case", GRAMMAR_CASES, ids=[c["id"] for c in GRAMMAR_CASES])
def test_a_published_schema_accepts_only_valid_text(model: Any, case: dict[str, Any]) -> None:
    constraint = model.start(response_format=json_schema(case["schema"]))
    assert model.accepts(constraint, case["text"]) is case["valid"]


VIOLATIONS = [c for c in CASES if c["kind"] == "schema_violation"]


@pytest.mark.parametrize("case", VIOLATIONS, ids=[c["id"] for c in VIOLATIONS])
def test_a_violation_cannot_be_written(model: Any, case: dict[str, Any]) -> None:
    given = {"response_format": json_schema(case["schema"])}
    if case["violated"] == "uniqueItems":
        with pytest.raises(BadRequest, match="'uniqueItems'"):
            model.compiler.structure(model.request(**given))
    else:
        assert not model.accepts(model.start(**given), case["text"])


POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
    },
    "required": ["x", "on"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "kind": {"anyOf": [{"const": "dir"}, {"const": "file"}, {"type": "null"}]},
                "size": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 1},
            },
            "required": ["kind", "size", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/Node",
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"x":1,"on":true}', True),
        ('{"x": 1, "on": true}', True),
        ('{"x": 1,"on":true}', True),
        ('{\n  "x": 1,\n  "on": true\n}', False),
        ('{"x" : 1, "on": true}', False),
        ('{"x":\t1, "on": true}', False),
        ('{"x":  1, "on": true}', False),
        ('{\n\n"x":1,"on":true}', False),
        ('{"x":1,"on":true} ', False),
        (' {"x":1,"on":true}', True),
        (" " * 8 + '{"x":1,"on":true}', True),
        (" " * 9 + '{"x":1,"on":true}', False),
    ],
)
def test_white_space_is_natural_and_bounded(model: Any, text: str, fits: bool) -> None:
    assert model.accepts(model.start(response_format=json_schema(POINT)), text) is fits


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"x": 1, "on": true}', True),
        ('{"x":1,"on":true}', True),
        ('{\n  "x": 1,\n  "on": true\n}', True),
        ('{\n\t"x": 1,\n\t"on": true\n}', True),
        ('{\n\n"x": 1, "on": true}', False),
        ("{\n" + "\t" * 11 + '"x": 1, "on": true}', False),
        ("{\n" + " " * 41 + '"x": 1, "on": true}', False),
    ],
)
def test_indented_json_is_allowed_if_templates_indent(model: Any, text: str, fits: bool) -> None:
    spaces = choose_whitespace("{{ call.arguments | tojson(indent=4) | indent(8) }}")
    lined = GrammarCompiler(model.tokenizer, model.eos, model.rows, spaces=spaces)
    structure = lined.structure(model.request(response_format=json_schema(POINT)))
    assert model.accepts(structure.constraint, text) is fits


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ tools | tojson(indent=4) }}{{ call.arguments | tojson }}",
        "{{ call.arguments }}{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}",
    ],
)
def test_json_stays_on_one_line_if_the_template_writes_calls_so(template: str | None) -> None:
    assert choose_whitespace(template) == ONE_LINE


def test_random_model_writes_valid_json_200_times(model: Any) -> None:
    """With at most one character of white space for each separator outside of strings, and some
    before the first bracket."""
    first = model.start(response_format=json_schema(TREE))
    ended = 0
    for seed in range(200):
        text, done = model.sample(first.fork(), seed, 600)
        bare = re.sub(r'"(?:[^"\\\\]|\\\\.)*"?', "", text.lstrip())
        assert sum(map(str.isspace, bare)) <= bare.count(",") + bare.count(":")
        if done:
            jsonschema.validate(json.loads(text), TREE)
        ended += done
    assert ended >= 190


def test_random_model_writes_a_json_object(model: Any) -> None:
    first = model.start(response_format={"type": "json_object"})
    done = [
        text for seed in range(30) for text, ok in [model.sample(first.fork(), seed, 300)] if ok
    ]
    assert done
    assert all(isinstance(json.loads(text), dict) for text in done)


def test_the_end_token_is_allowed_only_after_complete_text_and_then_forced(model: Any) -> None:
    constraint = model.start(response_format=json_schema(POINT))
    assert not model.eos & set(model.allowed_tokens(constraint))
    for token in model.encode('{"x": 1, "on": false}'):
        assert not constraint.finished
        assert not constraint.complete
        constraint.advance(token)
    assert constraint.finished
    assert constraint.complete
    assert set(model.allowed_tokens(constraint)) == model.eos
    constraint.advance(min(model.eos))
    assert constraint.finished


def test_rows_beyond_the_tokenizer_are_never_allowed(model: Any) -> None:
    constraint = model.start(grammar={"type": "regex", "value": "(?s:.*)"})
    assert constraint.mask().dtype == np.uint32
    assert constraint.mask().shape == ((model.rows + 31) // 32,)
    assert max(model.allowed_tokens(constraint)) < model.tokenizer.get_vocab_size()


def test_an_output_matrix_smaller_than_the_tokenizer(model: Any) -> None:
    rows = model.tokenizer.get_vocab_size() - 3
    small = GrammarCompiler(model.tokenizer, model.eos, rows)
    structure = small.structure(model.request(grammar={"type": "regex", "value": "(?s:.*)"}))
    assert structure.constraint.mask().shape == ((rows + 31) // 32,)
    assert max(model.allowed_tokens(structure.constraint)) < rows


def test_a_forbidden_token_fails_this_request_alone(model: Any) -> None:
    one = model.start(response_format=json_schema(POINT))
    two = model.start(response_format=json_schema(POINT))
    with pytest.raises(RequestFailed):
        one.advance(model.encode("x")[0])
    assert model.accepts(two, '{"x":2,"on":true}')


def test_masks_computed_beside_the_device_are_the_same(model: Any) -> None:
    asked = model.request(response_format=json_schema(TREE))
    with ThreadPoolExecutor(2) as pool:
        beside = GrammarCompiler(model.tokenizer, model.eos, model.rows, pool=pool)
        ahead, plain = beside.structure(asked), model.compiler.structure(asked)
        assert ahead is not None
        for seed in range(20):
            texts = [model.sample(s.constraint.fork(), seed, 60) for s in (ahead, plain)]
            assert texts[0] == texts[1]


def test_compiled_grammars_are_kept_up_to_their_size(model: Any) -> None:
    compiler = GrammarCompiler(model.tokenizer, model.eos, model.rows, letters=5000)
    for i in range(4):
        compiler.constraint(GrammarForm(f'start: "{i}{"x" * 2000}"'))
    assert len(compiler.compiled) == 2
    compiler.constraint(GrammarForm(f'start: "{"y" * 6000}"'))
    assert not compiler.compiled


def test_compiled_grammars_are_kept_up_to_capacity(model: Any) -> None:
    compiler = GrammarCompiler(model.tokenizer, model.eos, model.rows, capacity=2)
    for limit in (1, 2, 3, 1):
        schema = json_schema({"type": "integer", "maximum": limit})
        assert compiler.structure(model.request(response_format=schema)) is not None
    kept = [lark for _, lark in compiler.compiled]
    assert len(kept) == 2
    assert '"maximum": 1' in kept[-1]


def test_compiled_grammars_are_not_shared_by_tenants(model: Any) -> None:
    compiler = GrammarCompiler(model.tokenizer, model.eos, model.rows)
    asked = model.request(response_format=json_schema(POINT))
    for sender in ({}, {"salt": "a"}, {"salt": "b"}, {"salt": "a", "origin": "remote"}) * 2:
        compiler.structure(asked.model_copy(update=sender))
    assert len({lark for _, lark in compiler.compiled}) * 4 == len(compiler.compiled)


def test_many_threads_may_compile_at_once(model: Any) -> None:
    def write(seed: int) -> str:
        schema = {"type": "object", "properties": {"a": {"const": seed % 3}}, "required": ["a"],
                  "additionalProperties": False}  # fmt: skip
        text, _ = model.sample(model.start(response_format=json_schema(schema)), seed, 100)
        return text

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(write, range(40)))
    assert [json.loads(text)["a"] for text in texts] == [seed % 3 for seed in range(40)]


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("[a-c]{2}", "ab", True),
        ("[a-c]{2}", "abc", False),
        ("a/b", "a/b", True),
        (r"a\/b", "a/b", True),
        (r"\d+\n", "12\n", True),
        ("a\nb", "a\nb", True),
        (r"\\/", "\\/", True),
    ],
)
def test_regexes_accept_only_matches(model: Any, pattern: str, text: str, fits: bool) -> None:
    constraint = model.start(grammar={"type": "regex", "value": pattern})
    assert model.accepts(constraint, text) is fits


def test_a_lark_grammar_accepts_only_text_of_its_rules(model: Any) -> None:
    value = 'start: "a" inner*\ninner: "(" inner ")" | "b"'
    first = model.start(grammar={"type": "lark", "value": value})
    second = first.fork()
    assert model.accepts(first, "a((b))b")
    assert not model.accepts(second, "a((b)b")


PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}


def test_plain_text_needs_no_grammar(model: Any) -> None:
    for given in ({}, {"response_format": {"type": "text"}}, {"tools": [PING]}):
        assert model.compiler.structure(model.request(**given), HERMES) is None
    none = model.request(tools=[PING], tool_choice="none", response_format={"type": "json_object"})
    structure = model.compiler.structure(none, HERMES)
    assert not model.accepts(structure.constraint, "<tool_call>")


UNSUPPORTED: list[tuple[Any, list[str]]] = [
    ({"type": "array", "uniqueItems": True}, ["'uniqueItems'", "#"]),
    ({"propertyNames": {"maxLength": 3}}, ["'propertyNames'", "#"]),
    ({"properties": {"a": {"not": {"type": "string"}}}}, ["'not'", "#/properties/a"]),
    ({"$defs": {"B": {"if": {}, "then": False}}, "$ref": "#/$defs/B"}, ["'if'", "#/$defs/B"]),
    ({"anyOf": [{"contains": {}}]}, ["'contains'", "#/anyOf/0"]),
    ({"items": {"dependentRequired": {"a": ["b"]}}}, ["'dependentRequired'", "#/items"]),
    ({"$ref": "https://example.com/x"}, ["'$ref'", "https://example.com/x"]),
    ({"$ref": "#/$defs/none"}, ["/$defs/none"]),
    ({"type": "string", "format": "iri"}, ["'iri'"]),
    ({"type": "string", "pattern": "(?=a)b"}, ["look-around"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["oneOf"]),
    ({"type": "strin"}, ["strin"]),
    ({"properties": {"a": 3}}, ["#/properties/a"]),
    ({"properties": []}, ["#/properties"]),
    ({"anyOf": {}}, ["#/anyOf"]),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, ["'a'"]),
    (False, ["response_format"]),
]


@pytest.mark.parametrize(("schema", "words"), UNSUPPORTED)
def test_an_unsupported_schema_is_refused_by_name(
    model: Any, schema: Any, words: list[str]
) -> None:
    with pytest.raises(BadRequest) as refused:
        model.compiler.structure(model.request(response_format=json_schema(schema)))
    assert refused.value.param == "response_format"
    for word in words:
        assert word in refused.value.message


def test_a_schema_without_end_is_refused(model: Any) -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"items": schema}
    with pytest.raises(ValidationError, match="nested deeper"):
        model.compiler.structure(model.request(response_format=json_schema(schema)))


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
        {"grammar": {"type": "regex", "value": "("}},
        {"grammar": {"type": "lark", "value": "begin: 'a'"}},
        {"grammar": {"type": "gbnf", "value": "root ::= x"}},
        {"grammar": {"type": "regex"}},
        {"grammar": {"type": "regex", "value": "a"}, "response_format": {"type": "json_object"}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "none"}}},
        {"tool_choice": {"type": "function"}},
    ],
)
def test_a_bad_response_format_is_refused_by_parameter(model: Any, given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        model.compiler.structure(model.request(**given))
    assert refused.value.param is not None
    assert refused.value.param in given


ONE_NAME = {
    "type": "object",
    "properties": {"score": {"type": "integer", "multipleOf": 5}},
    "required": ["score"],
    "patternProperties": {"^score$": {"type": "integer"}},
    "additionalProperties": False,
}
"""Its pattern matches no name but that of the listed property."""
REWRITTEN: list[tuple[Any, str, bool]] = [
    ({"type": "object", "propertyNames": {"type": "string"}}, '{"b":1}', True),
    ({"propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
     '{"ab":1}', True),
    ({"propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
     '{"A":1}', False),
    ({"type": "object", "propertyNames": {"type": "string", "enum": ["a"]}}, '{"b":1}', False),
    ({"properties": {"a": {}}, "unevaluatedProperties": False, "type": "object"}, '{"b":1}', False),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, "[7]", True),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, "[7,8]", False),
    ({"type": "integer", "if": {"minimum": 3}}, "1", True),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "3", False),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": False}, "3", True),
    ({"type": "array", "uniqueItems": False, "items": {"type": "null"}}, "[null,null]", True),
    ({"type": "string", "format": "password"}, '"x"', True),
    ({"title": "T", "default": 1, "x-note": {"not": 1}, "type": "integer"}, "3", True),
    ({"properties": {"not": {"type": "null"}}, "type": "object"}, '{"not":null}', True),
    ({"const": {"$ref": "x", "not": 1}}, '{"$ref":"x","not":1}', True),
    (True, '{"a":[1]}', True),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://e.com/a",
      "definitions": {"a/b": {"type": "null"}}, "items": {"$ref": "#/definitions/a~1b"},
      "type": "array"}, "[null]", True),
    (ONE_NAME, '{"score": 5}', True),
    (ONE_NAME, '{"score": 6}', False),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}, "required": ["a"]}, '{"a":1}', True),
    ({"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"patternProperties": {"^[a]$": {"minimum": 3}}, "additionalProperties": False}]},
     '{"a":2}', False),
    ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":1}', True),
    ({"type": "object", "minProperties": 1}, "{}", False),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "fits"), REWRITTEN)
def test_unsupported_keywords_with_an_equivalent_form_are_rewritten(
    model: Any, schema: Any, text: str, fits: bool
) -> None:
    assert model.accepts(model.start(response_format=json_schema(schema)), text) is fits


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": {"enum": [1]}},
        {"required": ["c"], "minProperties": 3},
        {"properties": {"c": {}}, "required": ["c"], "patternProperties": {"^d": {}},
         "additionalProperties": False, "minProperties": 3},
    ],
)  # fmt: skip
def test_the_same_name_twice_does_not_count_as_two(model: Any, schema: Any) -> None:
    whole = {"type": "object", "minProperties": 2, **schema}
    with pytest.raises(BadRequest, match="'minProperties'"):
        model.start(response_format=json_schema(whole))


def test_a_dead_end_is_refused_with_its_reason(model: Any) -> None:
    """Beside the property that it lists, the schema that it refers to leaves no name."""
    only = {"patternProperties": {"^score$": {"maximum": 9}}, "additionalProperties": False}
    schema = {**ONE_NAME, "allOf": [{"$ref": "#/$defs/only"}], "$defs": {"only": only}}
    del schema["additionalProperties"]
    with pytest.raises(BadRequest, match="nothing can follow"):
        model.start(response_format=json_schema(schema))


def thinking(model: Any, opened: bool, **given: Any) -> AfterThoughts:
    thoughts = Thoughts("<think>", ("</think>",), opened, barred=("<tool_call>",))
    structure = model.compiler.structure(model.request(**given), HERMES, thoughts)
    assert isinstance(structure, Structure)
    assert isinstance(structure.constraint, AfterThoughts)
    return structure.constraint


@pytest.mark.parametrize(
    ("opened", "text", "fits"),
    [
        (True, 'hm, {"y</think>\n\n{"x":1,"on":true}', True),
        (True, '</think>{"x":1,"on":true}', True),
        (True, "hm</think>\n\nwell", False),
        (True, "hm", False),
        (True, '{"x":1,"on":true}', False),
        (True, "<tool_call>", False),
        (False, '<think>hm</think>\n{"x":1,"on":true}', True),
        (False, '{"x":1,"on":true}', True),
        (False, "hm", False),
        (False, '{<think>hm</think>"x":1,"on":true}', False),
        (True, '</think><think></think>{"x":1,"on":true}', False),
        (True, "</think>" + "\n" * 9 + '{"x":1,"on":true}', False),
    ],
)
def test_the_grammar_waits_for_the_end_of_the_thoughts(
    model: Any, opened: bool, text: str, fits: bool
) -> None:
    constraint = thinking(model, opened, response_format=json_schema(POINT))
    assert model.accepts(constraint, text) is fits


def test_an_end_marker_split_over_tokens_starts_the_grammar(model: Any) -> None:
    thoughts = Thoughts("<ponder>", ("</ponder>", "[end]"), opened=True)
    structure = model.compiler.structure(
        model.request(response_format=json_schema(POINT)), None, thoughts
    )
    fork = structure.constraint.fork()
    assert model.accepts(structure.constraint, '本 hm</ponder>\n{"x":1,"on":true}')
    assert model.accepts(fork, 'hm[end]{"x":1,"on":true}')


def test_thoughts_do_not_end_the_reply(model: Any) -> None:
    constraint = thinking(model, True, tools=[PING], tool_choice="required")
    assert not model.eos & set(model.allowed_tokens(constraint))
    assert not constraint.finished
    assert not constraint.complete
    assert len(model.allowed_tokens(constraint)) == model.rows - len(model.eos) - 1


ADDRESSED = MessageGrammar("<think>", "</think>", "next", "<final>")


def test_a_format_with_addressed_messages_demands_the_address_of_the_answer(model: Any) -> None:
    """A thought may come first; answers and calls come under their own address."""
    ping = {"type": "function", "function": {"name": "ping"}}
    for given, text in (
        ({"response_format": json_schema(POINT)}, '<final>{"x":1,"on":true}'),
        (
            {"tools": [ping], "tool_choice": "required"},
            '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        ),
    ):
        asked = model.request(**given)
        structure = model.compiler.structure(asked, HERMES, messages=ADDRESSED)
        assert model.accepts(structure.constraint.fork(), text)
        assert model.accepts(structure.constraint.fork(), f"<think>Well {{</think>next{text}")
        assert not model.accepts(structure.constraint.fork(), f"<think>Well</think>{text}")
        assert not model.accepts(structure.constraint.fork(), text.removeprefix("<final>") + "!")


@pytest.mark.parametrize("grammar", [("regex", "a+"), ("lark", 'start: "a" b // }\nb: /a*/')])
def test_a_grammar_applies_after_the_address_of_an_answer(model: Any, grammar: Any) -> None:
    asked = model.request(grammar=dict(zip(("type", "value"), grammar, strict=True)))
    structure = model.compiler.structure(asked, messages=ADDRESSED)
    assert model.accepts(structure.constraint, "<final>aa")
