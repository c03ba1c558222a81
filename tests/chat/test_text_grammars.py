"""The texts of tools with a grammar of their own: enforced, and read back, in every format."""

import json
import re
from typing import Any

import pytest

from byte_model import read
from mlx_provider.errors import BadRequest
from mlx_provider.records import ToolParser
from mlx_provider_tool_parsers import mlx_tool_parsers

PATCH = """
start: begin (add | cut)+ end  // as agents send them
begin: "*** Begin \\"x\\"" LF
end: "*** End"
add: "+" /[a-z"\\\\]{1,3}/ LF -> line
cut: "-" WORD [LF] LF
WORD: /(?:ab|c.)/
%import common.LF
"""
WHOLE = re.compile(r'\*\*\* Begin "x"\n(\+[a-z"\\]{1,3}\n|-(ab|c.)\n\n?)+\*\*\* End')
TEXT = '*** Begin "x"\n+a"\\\n-ab\n*** End'
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"content": {"type": "string"}},
    "required": ["content"],
}
TOOL = {"type": "function", "function": {"name": "patch", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}


def asked(value: str = PATCH, kind: str = "lark", **more: Any) -> dict[str, Any]:
    grammar = {"type": kind, "value": value}
    return {"tools": [TOOL, OTHER], "tool_grammars": {"patch": grammar}, **more}


PARSERS = list(mlx_tool_parsers())
(HERMES,) = (each for each in PARSERS if each.name == "hermes")


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_grammar_text_is_read_back_in_every_format(model: Any, parser: ToolParser) -> None:
    choice = {"type": "function", "function": {"name": "patch"}}
    first = model.start(parser.call_grammar(), **asked(tool_choice=choice))
    ended = 0
    for seed in range(6):
        text, done = model.sample(first.fork(), seed, 400)
        if done:
            ended += 1
            ((name, arguments),), _ = read(text, parser, [TOOL, OTHER])
            assert name == "patch"
            assert WHOLE.fullmatch(arguments["content"]), text
    assert ended


def test_a_grammar_text_cannot_contain_its_closing_tag(model: Any) -> None:
    parser = next(each for each in PARSERS if each.name == "qwen3_coder")
    wide = asked("start: /(?s:.*)/", tool_choice="required")
    first = model.start(parser.call_grammar(), **wide)
    written = parser.call_grammar().write("patch", {"content": "MORE"}, PARAMETERS)
    assert model.accepts(first.fork(), written)
    for more in ("a\n</parameter>\nb", "a</parameter>b"):
        assert not model.accepts(first.fork(), written.replace("MORE", more))


def test_without_a_tool_choice_only_the_text_of_a_call_is_constrained(model: Any) -> None:
    first = model.start(HERMES.call_grammar(), **asked())
    call = '<tool_call>\n{"name": "patch", "arguments": ARGS}\n</tool_call>'
    good = call.replace("ARGS", json.dumps({"content": TEXT}))
    bad = call.replace("ARGS", json.dumps({"content": TEXT.replace("+a", "*a")}))
    other = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    for text, fits in (
        ("Just text.", True),
        (good, True),
        (f"I change it.\n{good}", True),
        (f"{other}\n{good}", True),
        (f"I change it.\n{bad}", False),
    ):
        assert model.accepts(first.fork(), text) == fits, text


def test_a_grammar_for_a_tool_without_a_text_parameter_is_refused(model: Any) -> None:
    grammars = {"ping": {"type": "regex", "value": "x+"}}
    with pytest.raises(BadRequest, match="a format needs one text parameter: 'ping'"):
        model.start(None, tools=[OTHER], tool_grammars=grammars, tool_choice="required")


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ("start: nobody", "lark", "tools[0].function.format: grammar is not valid"),
        ("start: /a/ }\nb: %json {", "lark", "tools[0].function.format: grammar is not valid"),
        ("(a", "regex", "tools[0].function.format: grammar is not valid"),
        ("a" * 1_000_001, "regex", "tools[0].function.format: grammar is longer"),
        ('start: "(" start ")" | "x"', "lark", "cannot be enforced"),
        ('start: "x"\n%ignore " "', "lark", "%ignore"),
    ],
)
def test_a_grammar_that_cannot_be_enforced_is_refused(
    model: Any, value: str, kind: str, words: str
) -> None:
    for choice in ("auto", "required"):
        with pytest.raises(BadRequest) as caught:
            model.start(HERMES.call_grammar(), **asked(value, kind, tool_choice=choice))
        assert words in caught.value.message


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        (r'[a-z"\n]+x', 'a"\nx', "a\tx"),
        (r"(?:ab|c\\d){2}", "abc\\d", "ab"),
        (r"[^a]*", 'b"\n\t', "ba"),
        (r"\d+\s\w", "12\nx", "12_x"),
        ("a.c", 'a"c', "a\nc"),
        ("(?s)a.+", 'a"é\t\r', "a"),
    ],
)
def test_an_expression_matches_the_json_escaped_text(
    model: Any, pattern: str, fitting: str, other: str
) -> None:
    value = f"start: /{pattern}/"
    first = model.start(HERMES.call_grammar(), **asked(value, tool_choice="required"))
    for text, fits in ((fitting, True), (other, False)):
        call = json.dumps({"content": text}, ensure_ascii=False)
        written = f'<tool_call>\n{{"name": "patch", "arguments": {call}}}\n</tool_call>'
        assert model.accepts(first.fork(), written) == fits
