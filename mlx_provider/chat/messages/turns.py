"""A `Turn` is one message, or several that are merged (`join`). `place_results` puts the results of
tools behind their calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from .parts import Part

BLANK_LINE = "\n\n"
NO_RESULT = "[no result: this call did not end]"


@dataclass(frozen=True)
class Turn:
    role: str
    parts: tuple[Part, ...] = ()
    null: bool = False  # a turn with calls and no text: its content is null, not an empty text
    name: str | None = None
    calls: tuple[dict[str, Any], ...] = ()  # of an assistant
    call_id: str | None = None  # of a tool: the call that has this result
    reasoning: str = ""
    path: str = ""  # `messages[3]`, for warnings

    @property
    def plain(self) -> bool:
        """Whether it has no media."""
        return all(isinstance(part, str) for part in self.parts)

    @property
    def text(self) -> str:
        """Its texts, with blank lines between them."""
        return BLANK_LINE.join(part for part in self.parts if isinstance(part, str))


def join(first: Turn, second: Turn) -> Turn:
    """One turn of both, with a blank line between their texts, even if one of them is empty."""
    both = [first.reasoning, second.reasoning]
    parts = _joined_parts(first, second)
    return replace(
        first,
        parts=parts,
        null=not parts and second.null,
        name=first.name or second.name,
        calls=first.calls + second.calls,
        reasoning=BLANK_LINE.join(text for text in both if text),
    )


def _joined_parts(first: Turn, second: Turn) -> tuple[Part, ...]:
    if second.null:
        return first.parts
    if first.plain and second.plain:
        head, tail = first.parts or ("",), second.parts or ("",)
    else:
        head, tail = (tuple(part for part in turn.parts if part != "") for turn in (first, second))
    if head and tail and isinstance(head[-1], str) and isinstance(tail[0], str):
        return (*head[:-1], BLANK_LINE.join((head[-1], tail[0])), *tail[1:])
    return head + tail


def place_results(turns: Sequence[Turn]) -> tuple[list[Turn], list[str]]:
    """Returns the turns, with one result per call right after the turn of the calls and in their
    order, and warnings. Many templates show results by position, without ids. A call without a
    result gets `NO_RESULT`, unless only assistant turns follow. A result of no call stays."""
    calls = _Calls()
    for at, turn in enumerate(turns):
        calls.take(at, turn)
    calls.end_group()
    last = max((at for at, turn in enumerate(turns) if turn.role != "assistant"), default=-1)
    placed: list[Turn] = []
    warnings: list[str] = []
    for at, turn in enumerate(turns):
        placed += [] if at in calls.moved else [turn]
        for number, slot in enumerate(calls.slots.get(at, ())):
            if slot.results:
                placed.append(reduce(join, slot.results))
            elif at < last:
                placed.append(Turn("tool", (NO_RESULT,), call_id=slot.id, path=turn.path))
                warnings.append(f"{turn.path}.tool_calls[{number}] has no result: a text says so")
    return placed, warnings


@dataclass(eq=False)
class _Slot:
    id: str | None
    function: str
    results: list[Turn] = field(default_factory=list)

    @classmethod
    def of(cls, call: dict[str, Any]) -> _Slot:
        call_id = call.get("id")  # clients may send a number
        return cls(None if call_id in (None, "") else str(call_id), call["function"]["name"])


class _Calls:
    """Finds the call of each result. Calls with only assistant turns between them are a group. A
    result belongs to the call with its id in the last group, or to the last earlier call with this
    id and no result: some clients count ids from 0 in every turn. A result with an unknown id goes
    to a call of the last group without a result: of the function that it names, else the first."""

    def __init__(self) -> None:
        self.slots: dict[int, list[_Slot]] = {}  # by the index of the calls' turn
        self.moved: set[int] = set()  # indices of the turns whose result is in a slot
        self._group: list[_Slot] = []
        self._open: dict[str, deque[_Slot]] = {}  # calls of the group without a result, by id
        self._filled: dict[str, _Slot] = {}  # the group's last call with a result, by id
        self._earlier: dict[str, list[_Slot]] = {}  # earlier calls without a result; keys: all ids
        self._strangers: list[tuple[int, Turn]] = []  # results in the group with an unknown id
        self._interrupted = False  # whether a turn of another role has followed the calls

    def take(self, at: int, turn: Turn) -> None:
        self._interrupted |= turn.role != "assistant"
        if turn.calls:
            if self._interrupted:
                self.end_group()
            self.slots[at] = [_Slot.of(call) for call in turn.calls]
            self._group += self.slots[at]
            for slot in self.slots[at]:
                if slot.id is not None:
                    self._open.setdefault(slot.id, deque()).append(slot)
        elif turn.role == "tool":
            self._take_result(at, turn, turn.call_id or "")

    def _take_result(self, at: int, turn: Turn, call_id: str) -> None:
        if call_id not in self._open and call_id not in self._earlier:
            self._strangers.append((at, turn))
        elif self._open.get(call_id):
            slot = self._filled[call_id] = self._open[call_id].popleft()
            self._put(slot, at, turn)
        elif call_id in self._filled:
            self._put(self._filled[call_id], at, turn)
        elif self._earlier.get(call_id):
            self._put(self._earlier[call_id].pop(), at, turn)

    def end_group(self) -> None:
        named: dict[str | None, deque[_Slot]] = {}
        for slot in self._group:
            if not slot.results:
                named.setdefault(slot.function, deque()).append(slot)
        nameless = []
        for at, turn in self._strangers:
            if named.get(turn.name):
                self._put(named[turn.name].popleft(), at, turn)
            else:
                nameless.append((at, turn))
        free = [slot for slot in self._group if not slot.results]
        for slot, (at, turn) in zip(free, nameless, strict=False):
            self._put(slot, at, turn)
        for call_id in self._open:
            self._earlier.setdefault(call_id, [])
        for slot in self._group:
            if slot.id is not None and not slot.results:
                self._earlier[slot.id].append(slot)
        self._group, self._open, self._filled, self._strangers = [], {}, {}, []
        self._interrupted = False

    def _put(self, slot: _Slot, at: int, turn: Turn) -> None:
        slot.results.append(turn if slot.id is None else replace(turn, call_id=slot.id))
        self.moved.add(at)
