"""Tool calls as Cohere's models write them (Command R7B, Command A, North), read and written.

    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}
    ]<|END_ACTION|>

Their thoughts are read by the reasoning parser `north`, which mlx-provider brings.
"""

import json
from collections.abc import Iterator
from typing import Any

from mlx_provider import CallGrammar, ToolParser, hookimpl
from mlx_provider.records import (
    NotACall,
    Reading,
    TextReader,
    Tools,
    claim,
    read_json,
    show_through,
)

mlx_provider_api = 1

START, END = "<|START_ACTION|>", "<|END_ACTION|>"
GRAMMAR = CallGrammar(
    before='{"tool_call_id": "{digits}", "tool_name": "{name}", "parameters": ',
    after="}",
    open=f"{START}[\n    ",
    close=f"\n]{END}",
    between=",\n    ",
)


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read one block; a fault in it makes text of everything up to its end."""
    yield from reader.expect(START)
    yield from claim(read_calls(reader), show_through(END))


def read_calls(reader: TextReader) -> Reading[None]:
    """A list of calls; a model that makes one may leave the brackets out."""
    yield from reader.space()
    listed = yield from reader.accept("[")
    while True:
        yield from reader.space()
        yield from Call(reader).read()
        yield from reader.space()
        if not listed or not (yield from reader.accept(",")):
            break
    if listed:
        yield from reader.expect("]")
        yield from reader.space()
    yield from reader.expect(END)


class Call:
    """One object, its keys in any order; parameters are reported while they are written, where the
    name stands before them."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader
        self.name = ""
        self.parameters = ""
        """Text that came before the name."""
        self.begun = False

    def read(self) -> Reading[None]:
        """Raises `NotACall`."""
        reader, more = self.reader, "{"
        while more:
            yield from reader.expect(more)
            yield from reader.space()
            key = yield from value_of(reader)
            yield from reader.space()
            yield from reader.expect(":")
            yield from reader.space()
            yield from self.member(key)
            yield from reader.space()
            more = yield from reader.at(",")
        yield from reader.expect("}")
        self.end()

    def member(self, key: Any) -> Reading[None]:
        """The value of one key."""
        if key == "tool_name" and not self.name:
            self.name = yield from value_of(self.reader)
            if not isinstance(self.name, str) or not self.name:
                raise NotACall("a tool's name is a text")
        elif key == "parameters" and not self.begun:
            yield from self.arguments()
        else:
            yield from read_json(self.reader, lambda text: None)

    def arguments(self) -> Reading[None]:
        """An object, which is passed on as it comes or once the name is known."""
        if (yield from self.reader.peek()) != "{":
            raise NotACall("parameters are an object")
        if self.name:
            self.begin()
            yield from read_json(self.reader, self.reader.arguments)
        else:
            self.parameters = yield from text_of(self.reader)

    def begin(self) -> None:
        self.begun = True
        self.reader.call(self.name)

    def end(self) -> None:
        """Raises `NotACall` for an object without a name."""
        if not self.name:
            raise NotACall("a call has a name")
        if not self.begun:
            self.begin()
            self.reader.arguments(self.parameters or "{}")
        self.reader.end_call()


def text_of(reader: TextReader) -> Reading[str]:
    """One JSON value as text."""
    parts: list[str] = []
    yield from read_json(reader, parts.append)
    return "".join(parts)


def value_of(reader: TextReader) -> Reading[Any]:
    """One JSON value."""
    return json.loads((yield from text_of(reader)))


@hookimpl
def mlx_tool_parsers() -> Iterator[ToolParser]:
    """Cohere's actions."""
    yield ToolParser(
        name="command_a",
        start=START,
        end=END,
        scan=scan,
        detect=lambda template: START in template,
        aliases=("cohere_command3", "cohere_command4", "north"),
        rank=2,
        grammar=GRAMMAR,
    )
