"""Muse: messages addressed to the model itself or to the user, calls as `atem:` tags."""

from __future__ import annotations

import re

from mlx_provider import ReasoningParser, ToolParser
from mlx_provider.records import Emit, NotACall, Reading, TextEnded, TextReader, Tools

from .invoke_tags import invoke

FORM = invoke("atem:function_calls", "atem:", bare=False, lines=False, forgiving=False)
START, MESSAGE, ENDS = "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>")

_WORD = re.compile(r"\w*")


def read_muse(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """A whole reply: ` to=self<|message|>thoughts<|eom|><|start|>assistant to=user...`."""
    while (yield from reader.peek()):
        mark = reader.mark()
        addressee = yield from _header(reader)
        if addressee is None:
            reader.rewind(mark)
            yield from _body(reader, reader.content, tools, ends=(START,))
            continue
        reader.release()
        if addressee == "self":
            reader.reason()
            yield from _body(reader, reader.reasoning, None)
            reader.answer()
        else:
            yield from _body(reader, reader.content, tools)


def _header(reader: TextReader) -> Reading[str | None]:
    """The addressee; None: no header stands here."""
    if (yield from reader.accept(START)):
        yield from reader.space()
        yield from reader.run(_WORD)
    yield from reader.space()
    if not (yield from reader.accept("to=")):
        return None
    addressee = yield from reader.run(_WORD)
    return addressee if (yield from reader.accept(MESSAGE)) else None


def _body(
    reader: TextReader, emit: Emit, tools: Tools | None, ends: tuple[str, ...] = ENDS
) -> Reading[None]:
    """One message, or text that no header stands before, in which only a header is no text."""
    block = FORM.blocks[0]
    stops = (*ends, block) if tools is not None else ends
    if ends is not ENDS:
        emit((yield from reader.accept(START)))
    while True:
        found = yield from reader.pass_until(stops, emit)
        if found != block:
            reader.skip(len(found) if ends is ENDS else 0)
            return
        mark = reader.mark()
        reader.hold()
        try:
            yield from FORM.scan(reader, tools or ())
        except (NotACall, TextEnded):
            reader.let_go(keep=False)
            reader.rewind(mark)
            emit(reader.skip(len(block)))
        else:
            reader.let_go(keep=True)
            reader.release()


def _speaks(template: str) -> bool:
    return "<atem:function_calls>" in template or "to=self" in template


def parsers() -> tuple[ToolParser, ...]:
    """The tool calls of this format."""
    return (
        ToolParser(
            name="muse",
            start=FORM.blocks[0],
            end=FORM.block_end,
            scan=FORM.scan,
            atomic=True,
            markers=(FORM.call, FORM.call_end, FORM.key, FORM.value_end),
            detect=_speaks,
            aliases=("muse_glimmer", "muse_spark"),
            rank=3,
        ),
    )


def reasoning_parsers() -> tuple[ReasoningParser, ...]:
    """The thoughts of this format."""
    return (
        ReasoningParser(
            name="muse",
            start="",
            end="",
            whole=read_muse,
            markers=(START, MESSAGE, *ENDS, FORM.blocks[0], FORM.block_end),
            detect=_speaks,
            aliases=("muse_glimmer",),
            rank=3,
        ),
    )
