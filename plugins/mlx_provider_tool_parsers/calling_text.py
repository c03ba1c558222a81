"""`[Calling tool: NAME({...})]`: the form of calls in histories of some servers, which models
imitate."""

from __future__ import annotations

from mlx_provider.records import NotACall, Reading, TextReader

from .json_text import read_call

OPENER = "[Calling tool:"


def scan_calling(reader: TextReader) -> Reading[None]:
    yield from reader.expect(OPENER)
    name = (yield from reader.until("(", "]")).strip()
    yield from reader.expect("(")
    if not name:
        raise NotACall("a call has a name")
    yield from read_call(reader, name)
    yield from reader.space()
    yield from reader.accept(")")
    yield from reader.accept("]")
