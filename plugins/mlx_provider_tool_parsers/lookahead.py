"""What follows in a reply decides what is read: looks ahead of a reader."""

from __future__ import annotations

from mlx_provider.records import Reading, TextReader


def behind(reader: TextReader, opener: str, *wanted: str) -> Reading[str]:
    """The one of `wanted` that stands behind `opener` and white space; nothing is read."""
    mark = reader.mark()
    yield from reader.accept(opener)
    yield from reader.space()
    found = yield from reader.at(*wanted)
    reader.rewind(mark)
    return found


def accept_spaced(reader: TextReader, *wanted: str) -> Reading[str]:
    """Read white space and one of `wanted`; without one, nothing."""
    mark = reader.mark()
    yield from reader.space()
    found = yield from reader.accept(*wanted)
    if found:
        reader.release()
    else:
        reader.rewind(mark)
    return found


def closes(reader: TextReader, closer: str, *following: str) -> Reading[bool]:
    """Read `closer` if one of `following` stands behind it, or the reply ends; else it is text."""
    mark = reader.mark()
    reader.skip(len(closer))
    yield from reader.space()
    found = yield from reader.at(*following)
    if found or not (yield from reader.peek()):
        reader.release()
        return True
    reader.rewind(mark)
    return False
