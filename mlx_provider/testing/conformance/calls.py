"""Inputs for the checks of formats: tools, arguments with misleading text (`calls`), replies full
of markers (`replies`), and text that a random model writes under a grammar (`ByteModel`)."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ...chat.constraints.compiler import AfterThoughts, Constraint, GrammarCompiler
from ...protocol.requests import GenerateRequest
from ...records import CallGrammar, ToolParser, value_types
from .. import DEMO

Holds = Constraint | AfterThoughts  # the constraint of one reply


def for_examples(strategy: st.SearchStrategy[Any], count: int, run: Callable[[Any], None]) -> None:
    """Call `run` with `count` examples of the strategy, the same in each run. Raises what `run`
    raises for the smallest example that fails."""
    configure = settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    configure(given(strategy)(lambda value: run(value)))()


def cut(text: str, sizes: list[int]) -> list[str]:
    """Cut a text into chunks of these sizes and a last one with the rest, which may be empty."""
    edges = [*accumulate(sizes, initial=0), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


PIECES = (  # of replies: calls and markers of many formats, and text
    *('{"name": "f", "arguments": {"a": 1, "b": "x</tool_call>y"}}', "[f(a='b')]", "call:f{a:1}"),
    *("f", "\n", " ", "plain", "é😀", "STOP", "v", "[", "{", '"', "\\", "</", "<", "|>"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "functions.f:0", "```json"),
    *("<arg_key>a</arg_key>", "<arg_value>1</arg_value>", '<invoke name="f">', "</invoke>"),
    *('<parameter name="a">', "<think>", "</think>", "<tool_call>", "</tool_call>"),
)
FRAGMENTS = (  # of plain text: beginnings of markers, and code
    *("<", "</", "<tool", "<tool_cal", "<|", "<|tool", "[", "[TOOL", "[TOOL_CALLS", "{", "}", "]"),
    *("<func", "<thin", "</thin", "call:", "functions.", "<｜", "\n", " ", "so", "»", "😀"),
    *("a < b", "x[i] = {", '{"value": 42}', "[1, 2]", "[see](http://x.test)"),
    "if (a[0] < b) { return; }",
)


def replies(markers: Sequence[str]) -> st.SearchStrategy[str]:
    """Random sequences of `PIECES` and `markers`; some lack one character."""
    return st.composite(_reply)(markers)


def _reply(draw: st.DrawFn, markers: Sequence[str]) -> str:
    parts = draw(st.lists(st.sampled_from([*PIECES, *markers, *markers]), max_size=14))
    text: str = "".join(parts)
    if text and draw(st.booleans()):
        place = draw(st.integers(0, len(text) - 1))
        text = text[:place] + text[place + 1 :]
    return text


def function(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    """A tool in OpenAI's form. `required`: names of parameters; `properties`: their schemas."""
    more = {"required": list(required)} if required else {}
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def function_of(name: str, keys: Sequence[str], kind: str) -> dict[str, Any]:
    """A tool with parameters of one JSON type."""
    return function(name, **{key: {"type": kind} for key in keys})


TEXT: dict[str, Any] = {"type": "string"}
SCHEMA: dict[str, Any] = {  # the parameters of TOOL: each way to say a type
    "type": "object",
    "$defs": {"Text": TEXT, "Count": {"type": "integer"}},
    "properties": {
        "text": TEXT, "note": {"$ref": "#/$defs/Text"}, "both": {"allOf": [TEXT]},
        "count": {"$ref": "#/$defs/Count"}, "share": {"type": "number"},
        "flag": {"type": "boolean"}, "list": {"type": "array"},
        "tree": {"type": "object", "properties": {"kids": {"type": "array"}}},
        "maybe": {"type": ["string", "null"]}, "mode": {"enum": ["all", "first", None]},
        "pick": {"enum": [1, 2, "3"]}, "few": {"items": {"type": "integer"}},
        "free": {"description": "any value"},
    },
}  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "put", "parameters": SCHEMA}}
PLAIN = {  # arguments of TOOL that are unambiguous in every format
    "text": 'two\nlines, <b>"quoted"</b> \\ [x] {y}', "note": "7", "both": "null",
    "count": -3, "share": 0.5, "flag": True,
    "list": [1, "a", [None]], "tree": {"kids": [{"a": "b"}]},
    "maybe": None, "mode": "first", "pick": "3",
    "few": [1, 2], "free": {"a": [1, {"b": None}]},
}  # fmt: skip
# TOOLS, for replies of the random model: with a recursive schema and limits of values
COUNT = {"type": ["integer", "null"], "minimum": 0, "maximum": 9}
KIND = {"anyOf": [{"const": "dir"}, {"const": "file"}]}
NODE = {
    "type": "object", "additionalProperties": False, "required": ["kind", "size", "children"],
    "properties": {
        "kind": {"anyOf": [*KIND["anyOf"], {"type": "null"}]}, "size": COUNT,
        "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "maxItems": 1},
    },
}  # fmt: skip
TREE: dict[str, Any] = {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}
PING: dict[str, Any] = {"type": "function", "function": {"name": "ping"}}
PUT = function(
    "put", "root", "kind", "count",
    root={"$ref": "#/$defs/Node"}, kind=KIND, count=COUNT,
    share={"type": "number", "minimum": 0, "maximum": 1},
    flags={"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
)  # fmt: skip
PUT["function"]["parameters"]["$defs"] = TREE["$defs"]
TOOLS: Sequence[dict[str, Any]] = (PING, PUT)
ODD = (  # parts of misleading text values
    *("a", "Ж", "本", "😀", " ", "\n", "\n\n", "\t", "\r", "\u2028"),
    *('"', "'", "\\", "\\n", "/", "`"),
    *("<", ">", "{", "}", "[", "]", "(", ")", ",", ":", "&amp;", "null", "7", "true", "```json\n"),
    *("<![CDATA[", "]]>", "<|im_end|>", "</s>", "<think>", "</think>", "[Calling tool: put({})]"),
)


def pieces(parser: ToolParser) -> list[str]:
    """Text with a meaning in this format: markers, and what its grammar writes around values."""
    grammar = parser.call_grammar()
    before, after = grammar.frame(1, "abcDEF123", "put")
    found = [*parser.visible(), grammar.open, grammar.close, after, before]
    if (tags := grammar.tagged) is not None:
        key = f"{tags.key_before}note{tags.key_after}"
        closed = tags.value_after.replace("{key}", "text")
        found += [key, f"\n{key}", before + key, closed, closed.strip(), *tags.barred, tags.between]
        found += [f"{closed.strip()} {key}", f"{closed.strip()}{after}"]
    return [piece for piece in found if piece]


def calls(parser: ToolParser, *, nested: bool = True) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments that fit SCHEMA, in its order, with misleading text values. `nested`: texts inside
    lists and objects mislead, too."""
    odd = st.lists(st.sampled_from([*ODD, *pieces(parser)]), max_size=6).map("".join)
    text = odd | st.text(st.characters(codec="utf-8"), max_size=6)
    inside = text if nested else st.text("ab</>", max_size=4)
    scalars = inside | st.integers() | st.booleans() | st.none()
    tree = st.recursive(
        scalars,
        lambda value: st.lists(value, max_size=2) | st.dictionaries(inside, value, max_size=2),
    )
    values: dict[str, st.SearchStrategy[Any]] = {
        "text": text, "note": text, "both": text, "count": st.integers(-(10**20), 10**20),
        "share": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "flag": st.booleans(), "list": st.lists(tree, max_size=3),
        "tree": st.fixed_dictionaries({}, optional={"kids": st.lists(tree, max_size=2)}),
        "maybe": st.none() | text, "mode": st.sampled_from(["all", "first", None]),
        "pick": st.sampled_from([1, 2, "3"]), "few": st.lists(st.integers(), max_size=3),
        "free": st.dictionaries(inside, scalars, max_size=2),
    }  # fmt: skip
    return st.fixed_dictionaries({}, optional=values).map(
        lambda found: {key: found[key] for key in values if key in found}
    )


def expected_arguments(parser: ToolParser, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the parser reads from a call with `arguments`. A format that writes text between tags
    without a mark cannot tell the text "null" from null, so where both are allowed, it is null."""
    tags = parser.call_grammar().tagged
    if tags is None or tags.quotes is None or tags.marks_text:
        return arguments
    unions = {k for k, v in SCHEMA["properties"].items() if value_types(v, SCHEMA) > {"string"}}
    return {
        key: None if key in unions and str(value).strip().lower() in ("null", "none") else value
        for key, value in arguments.items()
    }


Called = tuple[str, Any]  # name and arguments of a call
WORD = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,20}", fullmatch=True)  # a usual name
ODD_NAME = st.text(st.sampled_from("a-.:/ <>{}[]()\"'\\=,|&\n1Ж"), min_size=1, max_size=6)
VALUES: dict[str, Any] = {"string": "v", "integer": 1, "array": []}  # by JSON type


@dataclass
class ByteModel:
    """A random model: each token that a grammar allows is equally likely."""

    tokenizer: Tokenizer
    eos: frozenset[int]
    rows: int  # of the output matrix, at least the size of the vocabulary
    compiler: GrammarCompiler

    def request(self, **given: Any) -> GenerateRequest:
        """A request with these fields and any message."""
        return GenerateRequest(model="m", messages=[{"role": "user", "content": "x"}], **given)

    def start(self, calls: CallGrammar | None = None, **given: Any) -> Holds:
        """The constraint of a request with these fields, which must demand one. `calls`: the format
        of calls; JSON objects if unset."""
        structure = self.compiler.structure(self.request(**given), calls)
        assert structure is not None
        return structure.constraint

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def allowed_tokens(self, constraint: Holds) -> list[int]:
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
        return [int(token) for token in np.flatnonzero(bits)]

    def allows(self, constraint: Holds, token: int) -> bool:
        return bool(constraint.mask()[token // 32] >> token % 32 & 1)

    def accepts(self, constraint: Holds, text: str) -> bool:
        """Whether this text is a complete reply. Advances the constraint."""
        for token in self.encode(text):
            if not self.allows(constraint, token):
                return False
            constraint.advance(token)
        return any(self.allows(constraint, token) for token in self.eos)

    def sample(self, constraint: Holds, seed: int, limit: int) -> tuple[str, bool]:
        """A reply of up to `limit` tokens, and whether it is complete. Advances the constraint."""
        dice = random.Random(seed)  # noqa: S311
        tokens: list[int] = []
        while len(tokens) < limit and not constraint.finished:
            token = dice.choice(self.allowed_tokens(constraint))
            if token in self.eos:
                return self.decode(tokens), True
            constraint.advance(token)
            tokens.append(token)
        return self.decode(tokens), constraint.finished


@cache
def demo_model() -> ByteModel:
    """A random model with the tokenizer of the demo model."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    rows = tokenizer.get_vocab_size()
    eos = frozenset(tokenizer.token_to_id(end) for end in ("<|im_end|>", "<|endoftext|>"))
    return ByteModel(tokenizer, eos, rows, GrammarCompiler(tokenizer, eos, rows))
