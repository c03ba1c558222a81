"""Looks ahead in a reply: later text decides how a reader continues."""

from __future__ import annotations

from mlx_provider.records import Reading, TextReader


def behind(reader: TextReader, opener: str, *wanted: str) -> Reading[str]:
    """The text of `wanted` that follows `opener` and white space. Nothing is read."""
    mark = reader.mark()
    yield from reader.accept(opener)
    yield from reader.space()
    found = yield from reader.at(*wanted)
    reader.rewind(mark)
    return found


def accept_spaced(reader: TextReader, *wanted: str) -> Reading[str]:
    """Read white space and one of `wanted`, or nothing."""
    mark = reader.mark()
    yield from reader.space()
    found = yield from reader.accept(*wanted)
    if found:
        reader.release()
    else:
        reader.rewind(mark)
    return found


def closes(reader: TextReader, closer: str, *following: str) -> Reading[bool]:
    """Read `closer` if one of `following` or the end of the reply follows it."""
    mark = reader.mark()
    reader.skip(len(closer))
    yield from reader.space()
    found = yield from reader.at(*following)
    if found or not (yield from reader.peek()):
        reader.release()
        return True
    reader.rewind(mark)
    return False
