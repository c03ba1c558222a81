"""Calls as JSON objects, single or in a list, after a marker or at the start of an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_provider import ToolParser
from mlx_provider.records import NotACall, Reading, Rest, TextReader, Tools, through

from .json_text import CALL_KEYS, CallObject, balanced
from .values import accepts

_CLOSERS = re.compile(r"[\s}\]]*")
_BEGUN = re.compile(r'[\[\s]*\{\s*"([^"]*)')
"""An object with a key: from here on there are values, whose text must stay text."""


@dataclass(frozen=True)
class JsonBlock:
    openers: tuple[str, ...]
    """A final bracket is the first character of the JSON."""
    end: str = ""
    separators: tuple[str, ...] = (",", ";")
    arguments_needed: bool = False
    known: Callable[[str], bool] | None = None
    """Whether a call between markers can have this name; `None`: all names."""
    fence: str = ""
    """Text that closes a block which the model began with a code fence."""
    ids: bool = False

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        opener = yield from reader.at(*self.openers)
        body = opener.rstrip("[{")
        bare = not body or opener.startswith("```")
        reader.skip(len(body))
        yield from reader.space()
        yield from self.between(reader, accepts(tools) if bare else None)

    def between(
        self, reader: TextReader, bare: Callable[[str], bool] | None = None
    ) -> Reading[None]:
        """Read the text after the marker. `bare`: there was no marker, so the tools must be
        known."""
        before = reader.calls
        yield from self.values(reader, bare or self.known or _any, bare is not None)
        if reader.calls == before:
            raise NotACall("an empty list")
        yield from self.close(reader)

    def values(self, reader: TextReader, known: Callable[[str], bool], bare: bool) -> Reading[None]:
        while True:
            yield from self.value(reader, known, bare)
            mark = reader.mark()
            yield from reader.space()
            if self.separators and (yield from reader.accept(*self.separators)):
                yield from reader.space()
            repeated = yield from reader.at("{", "[{")
            if not repeated or (bare and repeated != "{"):
                reader.rewind(mark)
                return
            reader.release()

    def value(self, reader: TextReader, known: Callable[[str], bool], bare: bool) -> Reading[None]:
        start, needed = reader.mark(), self.arguments_needed or bare
        try:
            if (yield from reader.accept("[")):
                yield from self.items(reader, known, needed)
            else:
                yield from self.object(reader, known, needed)
        except NotACall as failure:
            begun = _BEGUN.match(reader.between(start, reader.position))
            if not begun:
                raise
            attempt = begun[1] in CALL_KEYS
            rest = self.rest(start, bare, attempt)
            raise NotACall(str(failure), whole=True, rest=rest) from failure
        reader.release()

    def object(
        self, reader: TextReader, known: Callable[[str], bool], needed: bool
    ) -> Reading[None]:
        call = CallObject(reader=reader, arguments_needed=needed, known=known, ids=self.ids)
        return call.read()

    def rest(self, start: int, bare: bool, attempt: bool) -> Rest:
        """The end of a malformed call. Other JSON ends at the first invalid character."""
        if self.end and not bare:
            return through(self.end)
        return balanced(start, strict=not attempt)

    def items(
        self, reader: TextReader, known: Callable[[str], bool], needed: bool
    ) -> Reading[None]:
        yield from reader.space()
        while not (yield from reader.accept("]")):
            yield from self.object(reader, known, needed)
            yield from reader.space()
            if (yield from reader.accept(",")):
                yield from reader.space()
            elif not (yield from reader.at("]")):
                return

    def close(self, reader: TextReader) -> Reading[None]:
        ends = tuple(x for x in (self.end, self.fence) if x)
        if not ends:
            return
        mark = reader.mark()
        yield from reader.run(_CLOSERS)
        if (yield from reader.accept(*ends)):
            reader.release()
        else:
            reader.rewind(mark)


def _any(name: str) -> bool:
    return True


def json_block(
    name: str,
    openers: tuple[str, ...],
    end: str,
    *,
    first: tuple[str, ...] = (),
    fence: str = "",
    **fields: Any,
) -> ToolParser:
    """JSON calls between one of `openers` and `end`. `first`: openers that are valid only at the
    start of an answer; `fields`: of `ToolParser`."""
    block = JsonBlock(openers=(*openers, *first), end=end, fence=fence)
    return ToolParser(
        name=name,
        start=openers[0],
        starts=openers[1:],
        first=first,
        end=end,
        scan=block.scan,
        **fields,
    )
