"""The text to show if a call that has begun is none."""

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
    """Read text that can only be a call. If it is none, it is text, and no call is looked for in
    it."""
    try:
        return (yield from reading)
    except NotACall as failure:
        raise NotACall(str(failure), whole=True, rest=failure.rest or rest) from failure
