"""Grammars over vocabularies whose special tokens stand at the first ids."""

import json
from typing import Any

import pytest

from mlx_provider.records import CallGrammar
from mlx_provider.testing.byte_model import MARKERS, ByteModel, byte_model

UNUSED = [f"<unused{i}>" for i in range(300)]
VOCABULARIES = {
    "a few": ["<|im_start|>", "<repo>", "<file>"],
    "markers among them": ["<s>", *MARKERS],
    "every id below 256": UNUSED,
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
CALLS = CallGrammar.json("<tool_call>\n", "\n</tool_call>")
TOOL = {"type": "function", "function": {"name": "move", "parameters": POINT}}


@pytest.fixture(scope="module", params=VOCABULARIES.values(), ids=VOCABULARIES)
def low(request: pytest.FixtureRequest) -> ByteModel:
    return byte_model(request.param)


def test_the_first_ids_are_special_tokens(low: ByteModel) -> None:
    assert low.tokenizer.get_added_tokens_decoder()[0].special


@pytest.mark.parametrize(
    ("given", "fits", "fails"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}},
            '{"x": 7}',
            '{"x": 100}',
        ),
        ({"response_format": {"type": "json_object"}}, '{"any": [1, null]}', "[1]"),
        ({"grammar": {"type": "regex", "value": "[a-f]{2,4}"}}, "cafe", "cage"),
        ({"grammar": {"type": "lark", "value": 'start: "yes" | "no"'}}, "no", "maybe"),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            '<tool_call>\n{"name": "move", "arguments": {"x": 3}}\n</tool_call>',
            '{"x": 3}',
        ),
    ],
    ids=["schema", "object", "regex", "lark", "call"],
)
def test_a_grammar_holds(low: ByteModel, given: dict[str, Any], fits: str, fails: str) -> None:
    start = low.started(CALLS, **given)
    assert low.accepts(start.fork(), fits)
    assert not low.accepts(start.fork(), fails)


def test_a_random_model_writes_what_the_schema_says(low: ByteModel) -> None:
    given = {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}}
    start = low.started(**given)
    for seed in range(5):
        text, ended = low.sample(start.fork(), seed, 200)
        assert ended
        assert 0 <= json.loads(text)["x"] <= 99
