"""Finished replies held against the format they were asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.chat.output.whole_reply import check_reply, find_json, violation
from mlx_provider.cli.parse import parse_line
from mlx_provider.errors import BadRequest
from mlx_provider.registry import PluginRegistry

DATA = Path(__file__).parents[1] / "data" / "chat"
CASES = [json.loads(line) for line in (DATA / "json_schema.jsonl").read_text().splitlines()]


def cases(*kinds: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in CASES if case["kind"] in kinds]


@pytest.mark.parametrize("case", cases("extract_json"))
def test_json_is_extracted_from_text_as_in_the_published_cases(case: dict[str, Any]) -> None:
    assert next(find_json(case["text"]), None) == case["expected"]


@pytest.mark.parametrize("case", cases("response_format_parse"))
def test_a_reply_is_parsed_and_judged_as_in_the_published_cases(case: dict[str, Any]) -> None:
    checked = check_reply(case["text"], case["response_format"])
    assert {"parsed": checked.parsed, "is_valid": checked.is_valid} == case["expected"]


@pytest.mark.parametrize("case", cases("schema_validate"))
def test_a_value_is_judged_against_a_schema_as_in_the_published_cases(case: dict[str, Any]) -> None:
    assert (violation(case["instance"], case["schema"]) == "") is case["valid"]


@pytest.mark.parametrize("case", cases("schema_violation", "schema_accept", "schema_reject"))
def test_a_text_is_judged_against_a_schema_with_the_violated_keyword(case: dict[str, Any]) -> None:
    violated = violation(json.loads(case["text"]), case["schema"])
    assert (violated == "") is case["valid"]
    assert case.get("violated", violated) == violated


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, None) for text in ("null", "1 or [NaN]", "[" * 100_000)),
        ('x {y} then [1, {"a": 2}] and {"b": 3}', [1, {"a": 2}]),
        ("```\n[1]\n``` or ```json\n{}\n```", [1]),
        ('```python\nx = [1]\n```\nso\n```json\n{"a": 1}\n```', {"a": 1}),
        ('```json\r\n"x"\r\n```', "x"),
    ],
)
def test_the_first_usable_json_value_in_a_text_is_found(text: str, value: Any) -> None:
    assert next(find_json(text), None) == value


def test_null_is_a_valid_reply_if_the_schema_permits_null() -> None:
    null = {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}
    assert check_reply("null", null).is_valid
    assert check_reply("```\nnull\n```", null).is_valid
    assert check_reply("nothing", null).is_valid is False


def test_numbers_beyond_floats_and_schemas_that_allow_nothing_are_violated() -> None:
    assert violation(10**400, {"multipleOf": 0.1}) == "multipleOf"
    assert violation({"a": 1}, {"properties": {"a": False}}) == "false"


@pytest.mark.filterwarnings("ignore:Automatically retrieving remote references")
def test_a_broken_schema_is_refused_and_no_file_is_read() -> None:
    for broken in ({"type": 3}, {"$schema": 5}, {"$schema": []}):
        with pytest.raises(BadRequest, match="schema is not valid"):
            violation(1, broken)
    references = ("#/nope", "#", (DATA / "client_messages.json").as_uri())
    urls: tuple[Any, ...] = ({"$schema": "http://["}, {"$id": "http://[", "$ref": "a"})
    for schema in (*({"$ref": nowhere} for nowhere in references), *urls):
        with pytest.raises(BadRequest, match="leads nowhere"):
            violation(1, schema)


@pytest.mark.parametrize("case", cases("response_format_parse"))
def test_the_parse_command_reports_whether_a_reply_fits_its_format(case: dict[str, Any]) -> None:
    line = {"chunks": list(case["text"]), "response_format": case["response_format"]}
    found = parse_line(json.dumps(line), PluginRegistry.discover())
    assert {"parsed": found["parsed"], "is_valid": found["valid"]} == case["expected"]
