"""Calls written as JSON objects, alone or in a list, after a marker or at an answer's start."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_provider import ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools

from .json_text import CallObject
from .schema import accepts

_CLOSERS = re.compile(r"[\s}\]]*")


@dataclass(frozen=True)
class JsonBlock:
    """Where JSON calls stand."""

    openers: tuple[str, ...]
    """Texts that open a block; a bracket at one's end is the first of the JSON."""
    end: str = ""
    separators: tuple[str, ...] = (",", ";")
    """What may stand between calls of one block."""
    arguments_needed: bool = False
    fence: str = ""
    """Text that closes a block where the model began it with a code fence."""

    def scan(self, reader: TextReader, tools: Tools) -> Reading[None]:
        """Read one block."""
        opener = yield from reader.at(*self.openers)
        body = opener.rstrip("[{")
        bare = not body
        reader.skip(len(body))
        before = reader.calls
        yield from reader.space()
        yield from self.values(reader, accepts(tools) if bare else _any, bare)
        if bare and reader.calls == before:
            raise NotACall("an empty list")
        yield from self.close(reader)

    def values(self, reader: TextReader, known: Callable[[str], bool], bare: bool) -> Reading[None]:
        needed = self.arguments_needed or bare
        while True:
            if (yield from reader.accept("[")):
                yield from self.items(reader, known, needed)
            else:
                yield from CallObject(reader, needed, known).read()
            mark = reader.mark()
            yield from reader.space()
            if self.separators and (yield from reader.accept(*self.separators)):
                yield from reader.space()
            repeated = yield from reader.at("{", "[{")
            if not repeated or (bare and repeated != "{"):
                reader.rewind(mark)
                return
            reader.release()

    def items(
        self, reader: TextReader, known: Callable[[str], bool], needed: bool
    ) -> Reading[None]:
        yield from reader.space()
        while not (yield from reader.accept("]")):
            yield from CallObject(reader, needed, known).read()
            yield from reader.space()
            if (yield from reader.accept(",")):
                yield from reader.space()
            elif not (yield from reader.at("]")):
                return

    def close(self, reader: TextReader) -> Reading[None]:
        """Read the end marker, and brackets too many before it."""
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
    """A format of JSON calls between one of `openers` and `end`.

    `first`: openers that count only where an answer begins; `fields`: of `ToolParser`.
    """
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
