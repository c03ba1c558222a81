"""What a format's grammar lets a model write, its own parser reads as exactly that call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_provider.chat.constraints.readable import check_readable
from mlx_provider.chat.constraints.written import written_call
from mlx_provider.chat.output.reply import Reply
from mlx_provider.errors import BadRequest
from mlx_provider.records import ToolParser, value_types
from mlx_provider_tool_parsers import mlx_reasoning_parsers, mlx_tool_parsers

PARSERS = {parser.name: parser for parser in mlx_tool_parsers()}
THOUGHTS = {parser.name: parser for parser in mlx_reasoning_parsers()}
"""Of formats that are read as a whole."""
TREE: dict[str, Any] = {"type": "object", "properties": {"kids": {"type": "array"}}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"Text": {"type": "string"}, "Count": {"type": "integer"}},
    "properties": {
        "text": {"type": "string"},
        "note": {"$ref": "#/$defs/Text"},
        "both": {"allOf": [{"type": "string"}]},
        "count": {"$ref": "#/$defs/Count"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "tree": TREE,
        "maybe": {"type": ["string", "null"]},
        "mode": {"enum": ["all", "first", None]},
    },
}
TOOL = {"type": "function", "function": {"name": "put", "parameters": SCHEMA}}
ODD = (
    *(
        "a",
        "Ж",
        "本",
        "😀",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\r",
        "\u2028",
        '"',
        "'",
        "\\",
        "\\n",
        "/",
        "`",
    ),
    *("<", ">", "{", "}", "[", "]", "(", ")", ",", ":", "&amp;", "null", "7", "true", "```json\n"),
    *("<![CDATA[", "]]>", "<|im_end|>", "</s>", "<think>", "</think>", "[Calling tool: put({})]"),
)


def pieces(parser: ToolParser) -> list[str]:
    """Text that may mislead this format's parser."""
    grammar = parser.call_grammar()
    found = [*parser.visible(), grammar.open, grammar.close, grammar.after]
    before = grammar.before.replace("{name}", "put").replace("{digits}", "1")
    found.append(before)
    if (tags := grammar.tagged) is not None:
        key = f"{tags.key_before}note{tags.key_after}"
        after = tags.value_after.replace("{key}", "text")
        found += [key, f"\n{key}", before + key, after, after.strip(), *tags.barred, tags.between]
        found += [f"{after.strip()} {key}", f"{after.strip()}{grammar.after}"]
    return [piece for piece in found if piece]


def texts(parser: ToolParser) -> st.SearchStrategy[str]:
    odd = st.lists(st.sampled_from([*ODD, *pieces(parser)]), max_size=6).map("".join)
    return odd | st.text(st.characters(codec="utf-8"), max_size=6)


def calls(parser: ToolParser) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments that fit SCHEMA, in its order."""
    text = texts(parser)
    inside = st.text("ab</>", max_size=4) if parser.name in PREFIXED else text
    scalars = inside | st.integers() | st.booleans() | st.none()
    tree = st.recursive(
        scalars,
        lambda value: st.lists(value, max_size=2) | st.dictionaries(inside, value, max_size=2),
    )
    values: dict[str, st.SearchStrategy[Any]] = {
        "text": text,
        "note": text,
        "both": text,
        "count": st.integers(-(10**20), 10**20),
        "share": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "flag": st.booleans(),
        "list": st.lists(tree, max_size=3),
        "tree": st.fixed_dictionaries({}, optional={"kids": st.lists(tree, max_size=2)}),
        "maybe": st.none() | text,
        "mode": st.sampled_from(["all", "first", None]),
    }
    order = list(values)
    return st.fixed_dictionaries({}, optional=values).map(
        lambda found: {key: found[key] for key in order if key in found}
    )


PREFIXED = {"minimax_m3"}
"""Every tag has a prefix that no text contains: that is the format's premise."""
LINED = {"seed_oss", "minimax_m2", "dots", "step3"}
"""One line end at a text's edge is read as the tag's own, as models of these formats write one."""


def meant(parser: ToolParser, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a reader cannot but make of arguments in this format."""
    return {key: _meant(parser, key, value) for key, value in arguments.items()}


def _meant(parser: ToolParser, key: str, value: Any) -> Any:
    tags = parser.call_grammar().tagged
    if tags is None or tags.text is None or not isinstance(value, str):
        return value
    union = value_types(SCHEMA["properties"][key], SCHEMA) > {"string"}
    if union and not tags.tells_text and value.strip().lower() in ("null", "none"):
        return None
    lined = parser.name in LINED
    return value.removeprefix("\n").removesuffix("\n") if lined else value


def read(text: str, parser: ToolParser, tools: list[Any]) -> tuple[list[Any], str]:
    """Calls, and the text beside them, that the reply machine makes of a reply."""
    reply = Reply(tools=tools, tool_parser=parser, reasoning_parser=THOUGHTS.get(parser.name))
    deltas = reply.push_text(text) + reply.finish("stop")[0]
    found: dict[int, list[str]] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        call = found.setdefault(piece.index, ["", ""])
        call[0] += piece.name or ""
        call[1] += piece.arguments
    beside = "".join(delta.content + delta.reasoning for delta in deltas)
    return [(name, json.loads(arguments)) for name, arguments in found.values()], beside.strip()


WIDELY = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", sorted(PARSERS))
@WIDELY
@given(data=st.data())
def test_what_may_be_written_is_read_as_it_was_meant(
    model: Any, name: str, data: st.DataObject
) -> None:
    parser = PARSERS[name]
    arguments = data.draw(calls(parser))
    text = written_call(parser.call_grammar(), "put", arguments, SCHEMA)
    constraint = model.started(parser.call_grammar(), tools=[TOOL], tool_choice="required")
    if model.accepts(constraint, text):
        assert read(text, parser, [TOOL]) == ([("put", meant(parser, arguments))], "")


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_no_piece_of_a_format_misleads_its_parser(model: Any, name: str) -> None:
    parser = PARSERS[name]
    first = model.started(parser.call_grammar(), tools=[TOOL], tool_choice="required")
    written = 0
    for piece in pieces(parser):
        for arguments in ({"text": f"a{piece}b", "note": ""}, {"note": piece}, {"list": [piece]}):
            text = written_call(parser.call_grammar(), "put", arguments, SCHEMA)
            if model.accepts(first.fork(), text) and not ("list" in arguments and name in PREFIXED):
                assert read(text, parser, [TOOL]) == ([("put", meant(parser, arguments))], "")
                written += 1
    assert written or name in PREFIXED


PLAIN = {
    "text": 'two\nlines, <b>"quoted"</b> \\ [x] {y}',
    "note": "7",
    "both": "null",
    "count": -3,
    "share": 0.5,
    "flag": True,
    "list": [1, "a", [None]],
    "tree": {"kids": [{"a": "b"}]},
    "maybe": None,
    "mode": "first",
}


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_every_format_writes_what_is_plain(model: Any, name: str) -> None:
    parser = PARSERS[name]
    text = written_call(parser.call_grammar(), "put", PLAIN, SCHEMA)
    constraint = model.started(parser.call_grammar(), tools=[TOOL], tool_choice="required")
    assert model.accepts(constraint, text)
    assert read(text, parser, [TOOL]) == ([("put", PLAIN)], "")


def named(name: str, keys: list[str], kind: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key in keys}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WORD = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)


@pytest.mark.parametrize("name", sorted(PARSERS))
@WIDELY
@given(data=st.data())
def test_a_tool_is_refused_or_its_calls_are_read(
    model: Any, name: str, data: st.DataObject
) -> None:
    """Whatever it and its parameters are called."""
    parser = PARSERS[name]
    odd = st.text(st.sampled_from("a-.:/ <>{}[]()\"'\\=,|&\n1Ж"), min_size=1, max_size=6)
    called = data.draw(WORD | odd)
    keys = data.draw(st.lists(WORD | odd, max_size=3, unique=True))
    tool = named(called, keys, data.draw(st.sampled_from(["string", "integer", "array"])))
    request = model.request(tools=[tool], tool_choice="required")
    value = {"string": "v", "integer": 1, "array": []}
    schema = tool["function"]["parameters"]
    arguments = {key: value[schema["properties"][key]["type"]] for key in keys}
    try:
        check_readable(request, parser)
    except BadRequest:
        return
    text = written_call(parser.call_grammar(), called, arguments, schema)
    started = model.started(parser.call_grammar(), tools=[tool], tool_choice="required")
    assert model.accepts(started, text)
    assert read(text, parser, [tool]) == ([(called, arguments)], "")


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_names_that_people_give_are_not_refused(model: Any, name: str) -> None:
    names = ["f", "get_weather", "Bash", "mcp__server__tool", "a1"]
    dashed = [] if name in ("llama4_pythonic", "lfm2", "olmo3") else ["get-it"]
    tools = [named(each, ["path", "old_string", "from", "X"], "string") for each in names + dashed]
    check_readable(model.request(tools=tools, tool_choice="required"), PARSERS[name])
