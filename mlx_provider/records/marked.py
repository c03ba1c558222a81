"""Blocks of calls that stand between two markers and are parsed as a whole."""

from __future__ import annotations

from .parsing import Parse, Tools
from .reading import NotACall, Reading, TextEnded, TextReader

_MOST_ENDS = 16
"""End markers that one call's arguments may contain before it is given up."""


def read_marked(
    reader: TextReader, openers: tuple[str, ...], end: str, parse: Parse, tools: Tools
) -> Reading[None]:
    """Read one block and report its calls; the reader stands on one of `openers`.

    An end marker inside an argument does not end the block: the first end at which `parse`
    succeeds does, but no block reaches over another opener. `end` empty: the reply's end.
    """
    yield from reader.accept(*openers)
    text = ""
    for _ in range(_MOST_ENDS):
        parts: list[str] = []
        ends = (end, *openers) if end else ()
        found = yield from reader.pass_until(ends, parts.append)
        text += "".join(parts)
        if found and found != end:
            raise NotACall("another call begins")
        try:
            calls = parse(text, tools)
        except ValueError as error:
            if not found:
                raise TextEnded from error
        else:
            reader.skip(len(found))
            for call in calls:
                reader.call(call.name)
                reader.arguments(call.arguments)
                reader.end_call()
            return
        text += reader.skip(len(found))
    raise NotACall("no call between all these end markers")
