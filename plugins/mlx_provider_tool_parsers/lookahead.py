"""Lookahead: later text of a reply decides how a reader continues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlx_provider.records import NotACall, Reading, TextReader

from .json_text import ignore


def behind(reader: TextReader, opener: str, *wanted: str) -> Reading[str]:
    """The text of `wanted` after `opener` and white space. Reads nothing."""
    mark = reader.mark()
    yield from reader.accept(opener)
    yield from reader.space()
    found = yield from reader.at(*wanted)
    reader.rewind(mark)
    return found


def accept_spaced(reader: TextReader, *wanted: str) -> Reading[str]:
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


Repeats = Literal["mistake", "apart", "text"]
"""A closing tag directly before another one is the end of the value (the other one is a mistake),
the same only with white space between them (`apart`), or text of the value."""


@dataclass(frozen=True)
class ValueTags:
    """Tags around values. All but `value_end` and `key` may be empty."""

    opener: str
    """Prefix of an opening tag of values, such as `<parameter`."""
    value_end: str
    key: str
    call_end: str
    block_end: str
    calls: tuple[str, ...]

    def closes(self, reader: TextReader, depth: int, repeats: Repeats) -> Reading[bool]:
        """Read the closing tag here if it ends its value. Tags must follow, up to the next call or
        the end of the reply. If text follows, no later closing tag may be left over. `depth`:
        opening tags in the value that are not closed. Raises `NotACall` if either of two closing
        tags can be the end."""
        start = reader.mark()
        reader.skip(len(self.value_end))
        space = yield from reader.space()
        while repeated := (yield from reader.at(self.value_end)):
            if depth or repeats == "text":
                break
            if repeats == "apart" and not space:
                raise NotACall("a closing tag stands twice")
            reader.skip(len(repeated))
            space = yield from reader.space()
        end = reader.mark()
        closed = not repeated and (yield from self._ends(reader, depth))
        reader.rewind(end)
        if closed:
            reader.release()
        else:
            reader.rewind(start)
        return closed

    def _ends(self, reader: TextReader, depth: int) -> Reading[bool]:
        found = yield from reader.at(*filter(None, (self.key, self.call_end, self.block_end)))
        if not found:
            return not (yield from reader.peek())
        if found != self.key:
            return (yield from self._clean_end(reader))
        return not depth or not (yield from self.is_left_over(reader))

    def _clean_end(self, reader: TextReader) -> Reading[bool]:
        """Read the end of a call. True: only another call can follow, or no closing tag of a value
        is left over."""
        for tag in filter(None, (self.call_end, self.block_end)):
            yield from reader.accept(tag)
            yield from reader.space()
        if not (yield from reader.peek()) or (yield from reader.at(*self.calls)):
            return True
        return not (yield from self.is_left_over(reader, to_end=True))

    def is_left_over(self, reader: TextReader, *, to_end: bool = False) -> Reading[bool]:
        """Read up to a closing tag without an opening one. False: there is none before the end of
        the call, or `to_end` of the reply."""
        depth = 0
        wanted = (self.opener, self.value_end, *([] if to_end else [self.call_end]))
        while found := (yield from reader.pass_until(wanted, ignore)):
            reader.skip(len(found))
            if found == self.opener:
                depth += 1
            elif found == self.value_end:
                if not depth:
                    return True
                depth -= 1
            elif (yield from self._calls_end(reader)):
                return False
        return False

    def _calls_end(self, reader: TextReader) -> Reading[bool]:
        yield from reader.space()
        ends = tuple(filter(None, (self.block_end, *self.calls)))
        return bool((yield from reader.at(*ends))) or not (yield from reader.peek())
