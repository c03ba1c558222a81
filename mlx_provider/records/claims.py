"""What is text where a call that had begun turns out to be none."""

from __future__ import annotations

from typing import TypeVar

from .reading import Emit, NotACall, Reading, Rest, TextReader

T = TypeVar("T")


def through(*ends: str) -> Rest:
    """Text up to and with the first of `ends`, or to the reply's end."""

    def rest(reader: TextReader, emit: Emit) -> Reading[None]:
        found = yield from reader.pass_until(ends, emit)
        emit(reader.skip(len(found)))

    return rest


def claimed(reading: Reading[T], rest: Rest | None = None) -> Reading[T]:
    """Read what only a call can be: a failure in it leaves text, in which no call is looked for."""
    try:
        return (yield from reading)
    except NotACall as failure:
        raise NotACall(str(failure), whole=True, rest=failure.rest or rest) from failure
