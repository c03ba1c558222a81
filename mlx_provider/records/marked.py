"""Blocks of calls between two markers that are parsed as a whole."""

from __future__ import annotations

from .parsing import Parse, ToolCall, Tools
from .reading import NotACall, Reading, TextEnded, TextReader

_MOST_MARKERS = 16
"""Maximum number of markers in the arguments of one call."""


def read_marked(
    reader: TextReader, openers: tuple[str, ...], end: str, parse: Parse, tools: Tools
) -> Reading[None]:
    """Read one block and report its calls; the reader is at one of `openers`.

    A marker inside an argument is text: the block ends at the first end at which `parse` succeeds.
    If it succeeds at none, a block with as many ends as openers is text. `end` empty: the end of
    the reply.
    """
    yield from reader.accept(*openers)
    text, inner, ended = "", 0, 0
    for _ in range(_MOST_MARKERS):
        parts: list[str] = []
        found = yield from reader.pass_until((end, *openers) if end else (), parts.append)
        text += "".join(parts)
        if found and found != end:
            if ended > inner:
                raise NotACall("no call", whole=True)
            inner += 1
        elif _ends(reader, found, parse, text, tools):
            return
        elif not found:
            raise NotACall("a call begins in it") if inner else TextEnded
        else:
            ended += 1
        text += reader.skip(len(found))
        if 0 < inner < ended:
            raise NotACall("no call", whole=True)
    raise NotACall("no call between all these markers")


def _ends(reader: TextReader, found: str, parse: Parse, text: str, tools: Tools) -> bool:
    """Report the calls in `text`, if it is calls; `found` is the end marker after it."""
    try:
        calls = parse(text, tools)
    except (ValueError, RecursionError):  # `json.loads` of a thousand brackets raises the latter
        return False
    if not calls:
        raise NotACall("no call")
    reader.skip(len(found))
    for call in calls:
        report_call(reader, call)
    return True


def report_call(reader: TextReader, call: ToolCall) -> None:
    """Report a whole call. Raises `TypeError` for the call of a broken parser."""
    if not isinstance(call.name, str) or not isinstance(call.arguments, str):
        raise TypeError(f"name and arguments of a call are text, not {call!r}")
    reader.call(call.name)
    reader.arguments(call.arguments)
    reader.end_call()
