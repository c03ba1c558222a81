"""`[Calling tool: NAME({...})]`: how some servers show calls in a conversation.

Models that read such a history write their next call the same way.
"""

from __future__ import annotations

from mlx_provider.records import NotACall, Reading, TextReader

from .json_text import read_json

OPENER = "[Calling tool:"


def scan_calling(reader: TextReader) -> Reading[None]:
    """Read one such call."""
    yield from reader.expect(OPENER)
    name = (yield from reader.until("(", "]")).strip()
    yield from reader.expect("(")
    yield from reader.space()
    if not name or (yield from reader.at("{")) != "{":
        raise NotACall("arguments are a JSON object")
    reader.call(name)
    yield from read_json(reader, reader.arguments)
    reader.end_call()
    yield from reader.space()
    yield from reader.accept(")")
    yield from reader.accept("]")
