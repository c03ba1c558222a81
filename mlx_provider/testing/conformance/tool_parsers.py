"""Tool-call formats: a parser with any text, and whether it agrees with its grammar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from hypothesis import strategies as st

from ...chat.constraints.readable import check_readable, written_call
from ...chat.output.whole_reply import WholeReply, read_chunks
from ...errors import BadRequest
from ...records import ReasoningParser, ToolParser
from ..byte_model import ByteModel
from . import calls as drawn
from .check import Check, Nonconformity, demand, same
from .examples import cut, for_examples
from .texts import FRAGMENTS, replies
from .work import bounded

SEEDS = 16
"""Replies that a random model writes under the grammar."""
LONGEST = 600
NESTED = 2000
LONG = 24_000
PIECE = 12
WORK = 30.0
"""Reading each character once takes a fraction of a second."""
BEFORE = "So I will do it. "


@dataclass(frozen=True)
class Format:
    parser: ToolParser
    thoughts: ReasoningParser | None
    """The plugin's reasoning parser of the same name, for formats with `whole`."""
    model: ByteModel

    def read(self, chunks: Sequence[str], tools: Sequence[Any] = ()) -> WholeReply:
        return read_chunks(
            chunks, tool_parser=self.parser, tools=tools, reasoning_parser=self.thoughts
        )

    def written(self, name: str, arguments: Any, schema: Any) -> str:
        return written_call(self.parser.call_grammar(), name, arguments, schema)

    def constraint(self, tools: Sequence[Any]) -> Any:
        grammar = self.parser.call_grammar()
        return self.model.started(grammar, tools=list(tools), tool_choice="required")

    def taken_back(self, text: str, tools: Sequence[Any]) -> tuple[list[drawn.Called], str]:
        """Raises `Nonconformity` for broken JSON."""
        found = self.read([text], tools)
        demand(not found.faults, f"the parser fails on {text!r}: {'; '.join(found.faults)}")
        summary = f"arguments of {text!r} are no JSON: {found.calls}"
        demand(len(found.whole_calls) == len(found.calls), summary)
        return found.whole_calls, (found.content + found.reasoning).strip()


def any_chunking(of: Format) -> None:
    call = of.written("put", drawn.PLAIN, drawn.SCHEMA)

    def check(given: tuple[str, list[int]]) -> None:
        text, sizes = given
        whole = of.read([text], [drawn.TOOL])
        demand(not whole.faults, f"the parser fails on {text!r}: {'; '.join(whole.faults)}")
        for chunks in (list(text), cut(text, sizes)):
            found = of.read(chunks, [drawn.TOOL])
            same(found, whole, f"{text!r} reads otherwise in the pieces {chunks[:40]}")

    texts = replies((*of.parser.visible(), call, call[: len(call) // 2]))
    for_examples(
        st.tuples(texts, st.lists(st.integers(0, 12), max_size=40)), 60, check, shrinks=True
    )


def plain_text(of: Format) -> None:
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        if any(marker in text for marker in of.parser.visible() if len(marker) > 2):
            return
        for chunks in ([text], list(text)):
            found = of.read(chunks)
            same((found.content, found.calls), (text, ()), f"{text!r} is no text any more")

    for_examples(st.lists(st.sampled_from(FRAGMENTS), max_size=12), 60, check, shrinks=True)


def grammar_to_parser(of: Format) -> None:
    first, ended = of.constraint(drawn.TOOLS), 0
    schemas = {each["function"]["name"]: each["function"] for each in drawn.TOOLS}
    for seed in range(SEEDS):
        text, done = of.model.sample(first.fork(), seed, LONGEST)
        if not done:
            continue
        ended += 1
        found, prose = of.taken_back(text, drawn.TOOLS)
        summary = f"of {text!r}, which the grammar allows, the parser makes {found} and {prose!r}"
        demand(bool(found) and not prose, summary)
        for name, arguments in found:
            demand(name in schemas, f"{summary}: no such tool")
            try:
                jsonschema.validate(arguments, schemas[name].get("parameters", True))
            except jsonschema.ValidationError as error:
                demand(kept=False, summary=f"{summary}: {error.message}")
    demand(ended > 0, f"of {SEEDS} random replies none ends within {LONGEST} tokens")
    _misleading(of)


def _misleading(of: Format) -> None:
    first = of.constraint([drawn.TOOL])

    def check(arguments: dict[str, Any]) -> None:
        text = of.written("put", arguments, drawn.SCHEMA)
        if of.model.accepts(first.fork(), text):
            _as_meant(of, text, arguments)

    for_examples(drawn.calls(of.parser, nested=False), 40, check, shrinks=True)
    for piece in drawn.pieces(of.parser):
        for arguments in ({"text": f"a{piece}b", "note": ""}, {"note": piece}):
            check(arguments)


def _as_meant(of: Format, text: str, arguments: dict[str, Any]) -> None:
    summary = f"the grammar allows {text!r}, which the parser reads otherwise"
    plain = [("put", drawn.meant(of.parser, arguments))]
    same(of.taken_back(text, [drawn.TOOL]), (plain, ""), summary)


def parser_to_grammar(of: Format) -> None:
    tools = [drawn.TOOL, drawn.PING]
    for name, arguments, schema in (("put", drawn.PLAIN, drawn.SCHEMA), ("ping", {}, {})):
        text = of.written(name, arguments, schema)
        same(of.taken_back(text, tools), ([(name, arguments)], ""), f"{text!r} reads otherwise")
        summary = f"the grammar does not allow {text!r}, which the parser reads"
        demand(of.model.accepts(of.constraint(tools), text), summary)
    first = of.constraint([drawn.PUT])
    schema = drawn.PUT["function"]["parameters"]
    for seed in range(SEEDS // 2):
        text, done = of.model.sample(first.fork(), seed, LONGEST)
        calls = of.taken_back(text, [drawn.PUT])[0] if done else []
        for name, arguments in calls[:1]:
            ordered = {key: arguments[key] for key in schema["properties"] if key in arguments}
            if not _exact(ordered):
                continue
            again = of.written(name, ordered, schema)
            summary = f"the grammar does not allow {again!r}, a call that the parser read"
            demand(of.model.accepts(first.fork(), again), summary)


def _exact(value: Any) -> bool:
    """Whether a grammar writes the value as JSON does: numbers have few digits."""
    if isinstance(value, dict):
        return all(map(_exact, value.values()))
    if isinstance(value, list):
        return all(map(_exact, value))
    return not isinstance(value, float) or (math.isfinite(value) and "e" not in repr(value))


def odd_names(of: Format) -> None:
    def check(given: tuple[str, list[str], str]) -> None:
        called, keys, kind = given
        tool = drawn.named(called, keys, kind)
        arguments = dict.fromkeys(keys, drawn.VALUES[kind])
        text = of.written(called, arguments, tool["function"]["parameters"])
        faults = of.read([text], [tool]).faults
        demand(not faults, f"the parser fails on {text!r}: {'; '.join(faults)}")
        try:
            check_readable(of.model.request(tools=[tool], tool_choice="required"), of.parser)
        except BadRequest:
            return
        demand(of.model.accepts(of.constraint([tool]), text), f"the grammar bars {text!r}")
        same(of.taken_back(text, [tool]), ([(called, arguments)], ""), f"{text!r} reads otherwise")

    names = drawn.WORD | drawn.ODD_NAME
    keys = st.lists(names, max_size=3, unique=True)
    kinds = st.sampled_from(sorted(drawn.VALUES))
    for_examples(st.tuples(names, keys, kinds), 40, check, shrinks=True)
    for name in ("f", "get_weather", "Bash", "mcp__server__tool", "a1"):
        tool = drawn.named(name, ["path", "old_string", "X"], "string")
        try:
            check_readable(of.model.request(tools=[tool], tool_choice="required"), of.parser)
        except BadRequest as error:
            raise Nonconformity(f"a name that people give is refused: {error}") from None


def cut_replies(of: Format) -> None:
    arguments = {"text": "two\nlines", "count": 3, "list": ["a", {"b": None}]}
    call = of.written("put", arguments, drawn.SCHEMA)
    for end in range(len(call)):
        for before in ("", BEFORE):
            text = before + call[:end]
            found = of.read([text], [drawn.TOOL])
            demand(not found.faults, f"the parser fails on {text!r}: {'; '.join(found.faults)}")
            _nothing_lost(of, text, before, found)
    if of.parser.whole is None:
        for opener in _marks(of.parser):
            text = f"{BEFORE}It begins with {opener} and so on."
            found = of.read([text], [drawn.TOOL])
            demand(
                found.content == text, f"of the sentence {text!r} only {found.content!r} is left"
            )


def _nothing_lost(of: Format, text: str, before: str, found: WholeReply) -> None:
    kept = (found.content + found.reasoning).strip()
    summary = f"of the cut reply {text!r} only {kept!r} and {found.calls} are left"
    demand(before.strip() in kept, f"the text before the call is lost: {summary}")
    if found.calls:
        name, arguments = found.calls[0]
        demand(len(found.calls) == 1 and name == "put", f"it becomes another call: {summary}")
        demand(arguments == "" or arguments[0] == "{", f"its arguments are no JSON: {summary}")
    elif of.parser.whole is None and text[len(before) :].startswith(_marks(of.parser)):
        demand(kept == before.strip(), f"a piece of a call is shown as text: {summary}")


def _marks(parser: ToolParser) -> tuple[str, ...]:
    """Openers other than the first bracket of JSON."""
    return tuple(mark for mark in (*parser.openers(), *parser.first) if mark.rstrip("[{"))


def bombs(of: Format) -> None:
    parser = of.parser
    call = of.written("put", {"text": "x"}, drawn.SCHEMA)
    head = call[: call.index("x")] if "x" in call else call[: len(call) // 2]
    heads = ["", head, of.written("put", {"list": []}, drawn.SCHEMA).partition("[]")[0]]
    openers = parser.openers() + parser.first
    bodies = [opener * 300 for opener in openers]
    bodies += [
        opener + piece * NESTED
        for opener in (*openers, *heads)
        for piece in ("[", '{"a": ', "{a:", "f(a=", "<a>", *openers[:1])
    ]
    closers = ("", *parser.closers()[:1])
    for body in (body + closer for body in bodies for closer in closers):
        with bounded(WORK, f"{body[:60]!r}... of {len(body)} characters"):
            _survives(of, body)
    endless = head + 'lorem ipsum, [dolor] "sit" ' * (LONG // 27)
    with bounded(WORK, f"a call of {LONG} characters in pieces of {PIECE}"):
        _survives(of, endless, PIECE)


def _survives(of: Format, text: str, size: int = 1000) -> None:
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    found = of.read(chunks, [drawn.TOOL])
    summary = f"the parser fails on {text[:80]!r}... of {len(text)} characters"
    demand(not found.faults, f"{summary}: {'; '.join(found.faults)[:300]}")


CHECKS: tuple[Check[Format], ...] = (
    Check(
        "any chunking",
        "A reply reads the same however its text is cut, and nothing in it makes the parser raise "
        "anything but what says that it is no call.",
        any_chunking,
    ),
    Check(
        "plain text",
        "Text that holds none of its markers arrives unchanged, beginnings of them included.",
        plain_text,
    ),
    Check(
        "grammar to parser",
        "Whatever the grammar lets a model write, the parser reads as exactly that call, and its "
        "arguments fit the tool's schema.",
        grammar_to_parser,
    ),
    Check(
        "parser to grammar",
        "A call that the parser reads may be written under the grammar.",
        parser_to_grammar,
    ),
    Check(
        "odd names",
        "A tool is refused by name or its calls are read, whatever it and its parameters are "
        "called.",
        odd_names,
    ),
    Check(
        "cut replies",
        "A reply that ends inside a call raises nothing, and no text of it is lost.",
        cut_replies,
    ),
    Check("bombs", "Size and nesting cost bounded work, and raise nothing.", bombs),
)
