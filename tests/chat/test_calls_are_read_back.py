"""What a format's grammar lets a model write, its own parser reads as exactly that call."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from byte_model import read
from mlx_provider.errors import BadRequest
from mlx_provider.serving.structure import check_readable
from mlx_provider.testing.conformance.calls import (
    ODD_NAME,
    PLAIN,
    SCHEMA,
    TOOL,
    VALUES,
    WORD,
    calls,
    expected_arguments,
    function_of,
    pieces,
)
from mlx_provider_tool_parsers import mlx_reasoning_parsers, mlx_tool_parsers

PARSERS = {parser.name: parser for parser in mlx_tool_parsers()}
THOUGHTS = {parser.name: parser for parser in mlx_reasoning_parsers()}
"""Of formats that are read as a whole."""

WIDELY = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


def reads_back(name: str, text: str, arguments: dict[str, Any]) -> bool:
    expected = [("put", expected_arguments(PARSERS[name], arguments))]
    return read(text, PARSERS[name], [TOOL], THOUGHTS.get(name)) == (expected, "")


def _is_ambiguous(arguments: dict[str, Any]) -> bool:
    """An opening tag in a text, and a closing one in another value: either may end the text."""
    opens = any("<" in value for value in arguments.values() if isinstance(value, str))
    others = [value for value in arguments.values() if not isinstance(value, str)]
    return opens and "</" in json.dumps(others, ensure_ascii=False)


@pytest.mark.parametrize("name", sorted(PARSERS))
@WIDELY
@given(data=st.data())
def test_the_parser_reads_back_every_call_that_the_grammar_accepts(
    model: Any, name: str, data: st.DataObject
) -> None:
    parser = PARSERS[name]
    arguments = data.draw(calls(parser))
    text = parser.call_grammar().write("put", arguments, SCHEMA)
    constraint = model.start(parser.call_grammar(), tools=[TOOL], tool_choice="required")
    if model.accepts(constraint, text):
        assert reads_back(name, text, arguments) or _is_ambiguous(arguments)
    else:
        assert arguments, "the first example, a call without arguments, may always be written"


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_pieces_of_the_format_inside_values_stay_values(model: Any, name: str) -> None:
    parser = PARSERS[name]
    first = model.start(parser.call_grammar(), tools=[TOOL], tool_choice="required")
    written = 0
    for piece in pieces(parser):
        for arguments in ({"text": f"a{piece}b", "note": ""}, {"note": piece}, {"list": [piece]}):
            text = parser.call_grammar().write("put", arguments, SCHEMA)
            if model.accepts(first.fork(), text):
                assert reads_back(name, text, arguments)
                written += 1
    assert written


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_every_format_writes_a_plain_call_that_its_parser_reads(model: Any, name: str) -> None:
    parser = PARSERS[name]
    text = parser.call_grammar().write("put", PLAIN, SCHEMA)
    constraint = model.start(parser.call_grammar(), tools=[TOOL], tool_choice="required")
    assert model.accepts(constraint, text)
    assert read(text, parser, [TOOL], THOUGHTS.get(name)) == ([("put", PLAIN)], "")


@pytest.mark.parametrize("name", sorted(PARSERS))
@WIDELY
@given(data=st.data())
def test_calls_of_an_oddly_named_tool_are_read_unless_the_tool_is_refused(
    model: Any, name: str, data: st.DataObject
) -> None:
    """Whatever it and its parameters are called."""
    parser = PARSERS[name]
    called = data.draw(WORD | ODD_NAME)
    keys = data.draw(st.lists(WORD | ODD_NAME, max_size=3, unique=True))
    tool = function_of(called, keys, data.draw(st.sampled_from(["string", "integer", "array"])))
    request = model.request(tools=[tool], tool_choice="required")
    schema = tool["function"]["parameters"]
    arguments = {key: VALUES[schema["properties"][key]["type"]] for key in keys}
    try:
        check_readable(request, parser)
    except BadRequest:
        return
    text = parser.call_grammar().write(called, arguments, schema)
    started = model.start(parser.call_grammar(), tools=[tool], tool_choice="required")
    assert model.accepts(started, text)
    assert read(text, parser, [tool], THOUGHTS.get(name)) == ([(called, arguments)], "")


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_common_tool_and_parameter_names_are_accepted(model: Any, name: str) -> None:
    names = ["f", "get_weather", "Bash", "mcp__server__tool", "a1"]
    dashed = [] if name in ("llama4_pythonic", "lfm2", "olmo3") else ["get-it"]
    tools = [
        function_of(each, ["path", "old_string", "from", "X"], "string") for each in names + dashed
    ]
    check_readable(model.request(tools=tools, tool_choice="required"), PARSERS[name])
