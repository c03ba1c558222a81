"""Harmony (gpt-oss): every message is addressed to a channel, and calls to a recipient."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlx_provider import ReasoningParser, ToolParser
from mlx_provider.records import Emit, NotACall, Reading, TextEnded, TextReader, Tools

from .json_text import read_json

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.:/-]+)")


@dataclass
class Edges:
    """Shows a message without the white space at its ends."""

    emit: Emit
    begun: bool = False
    held: str = ""

    def piece(self, text: str) -> None:
        """The next text of the message."""
        if not self.begun:
            text = text.lstrip()
            self.begun = bool(text)
        text = self.held + text
        shown = text.rstrip()
        self.held = text[len(shown) :]
        if shown:
            self.emit(shown)


def read_harmony(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """A whole reply. Without tools, what is addressed to a tool shows as content."""
    while True:
        space = yield from reader.space()
        found = yield from reader.at(*MARKERS)
        if found in (END, CALL, RETURN):
            reader.skip(len(found))
        elif found:
            yield from _message(reader, tools)
        elif (yield from reader.peek()):
            reader.content(space)
            yield from reader.pass_until(MARKERS, reader.content)
        else:
            return


def _message(reader: TextReader, tools: Tools | None) -> Reading[None]:
    header: list[str] = []
    while True:
        found = yield from reader.pass_until((MESSAGE, END, CALL, RETURN, START), header.append)
        if found != START:
            break
        header = []
        reader.skip(len(found))
    reader.skip(len(found))
    text = "".join(header)
    if found != MESSAGE:
        if CHANNEL not in text:
            reader.content(text.strip())
        return
    channel = _CHANNEL.search(text)
    recipient = _RECIPIENT.search(text)
    name = channel[1] if channel else "final"
    if recipient is not None and tools is not None and recipient[1] != "user":
        yield from _call(reader, recipient[1].removeprefix("functions."))
    elif name == "analysis" and recipient is None:
        reader.reason()
        yield from _body(reader, Edges(reader.reasoning).piece, thoughts=True)
        reader.answer()
    else:
        yield from _body(reader, Edges(reader.content).piece, thoughts=False)


def _body(reader: TextReader, emit: Emit, *, thoughts: bool) -> Reading[None]:
    """Message text up to its end; an end marker inside an answer is text if text follows."""
    ends = (END, CALL, RETURN, START, CHANNEL)
    while True:
        found = yield from reader.pass_until(ends, emit)
        if found in ("", START, CHANNEL):
            return
        mark = reader.mark()
        reader.skip(len(found))
        if thoughts or found != END:
            reader.release()
            return
        yield from reader.space()
        following = yield from reader.at(*MARKERS)
        if following or not (yield from reader.peek()):
            reader.release()
            return
        reader.rewind(mark)
        emit(reader.skip(len(found)))


def _call(reader: TextReader, name: str) -> Reading[None]:
    yield from reader.space()
    mark = reader.mark()
    before = reader.calls
    try:
        if (yield from reader.peek()) != "{":
            raise NotACall("arguments are a JSON object")
        reader.call(name)
        yield from read_json(reader, reader.arguments)
        reader.end_call()
    except NotACall:
        if reader.calls == before:
            reader.rewind(mark)
            yield from _body(reader, Edges(reader.content).piece, thoughts=False)
            return
        reader.abandon_call()
    except TextEnded:
        reader.abandon_call()
        return
    reader.release()
    found = yield from reader.pass_until((END, CALL, RETURN, START, CHANNEL), _ignore)
    if found in (END, CALL, RETURN):
        reader.skip(len(found))


def _ignore(text: str) -> None:
    pass


def _speaks(template: str) -> bool:
    return CHANNEL in template and "analysis" in template


def parsers() -> tuple[ToolParser, ...]:
    """The tool calls of this format."""
    return (
        ToolParser(
            name="harmony",
            start="",
            end=CALL,
            whole=read_harmony,
            markers=MARKERS,
            detect=_speaks,
            aliases=("gpt-oss", "gpt_oss", "openai"),
            rank=3,
        ),
    )


def reasoning_parsers() -> tuple[ReasoningParser, ...]:
    """The thoughts of this format."""
    return (
        ReasoningParser(
            name="harmony",
            start="",
            end="",
            whole=read_harmony,
            markers=MARKERS,
            detect=_speaks,
            aliases=("gpt-oss", "gpt_oss", "openai_gptoss"),
            rank=3,
        ),
    )
