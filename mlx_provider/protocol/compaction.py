"""Joins waiting deltas of one choice, and estimates the memory of events."""

from __future__ import annotations

from .events import Delta, Embedded, Event, Finish, ToolCallDelta

JOINED = 2**18
"""Bytes of an event to which nothing more is joined."""
EVENT_BYTES = 750
"""Bytes of an event beside its text (measured: pydantic 2.12, CPython 3.11)."""
CALL_BYTES = 550
LOGPROB_BYTES = 800


def size(event: Event) -> int:
    if isinstance(event, Embedded):
        return EVENT_BYTES + len(event.vector)
    if not isinstance(event, Delta):
        return EVENT_BYTES
    calls = sum(CALL_BYTES + len(call.arguments) for call in event.tool_calls)
    named = sum(1 + len(entry.top) for entry in event.logprobs)
    return EVENT_BYTES + len(event.content) + len(event.reasoning) + calls + LOGPROB_BYTES * named


def compacted(events: list[Event]) -> list[Event]:
    """Joins deltas; the order within a choice does not change."""
    if len(events) < 2:
        return events
    runs: list[_Run | Event] = []
    growing: dict[int, _Run] = {}
    for event in events:
        if not isinstance(event, Delta):
            runs.append(event)
            _end_runs(growing, event)
            continue
        run = growing.get(event.index)
        if run is None or not run.takes(event):
            run = growing[event.index] = _Run()
            runs.append(run)
        run.add(event)
    return [run.joined() if isinstance(run, _Run) else run for run in runs]


def _end_runs(growing: dict[int, _Run], event: Event) -> None:
    """End the open deltas of the event's choice; of all choices if it belongs to all."""
    if isinstance(event, Finish):
        growing.pop(event.index, None)
    else:
        growing.clear()


class _Run:
    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.bytes = 0

    def takes(self, delta: Delta) -> bool:
        return self.bytes < JOINED and _last_kind(self.deltas[-1]) <= _first_kind(delta)

    def add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.bytes += size(delta) - EVENT_BYTES

    def joined(self) -> Delta:
        if len(self.deltas) == 1:
            return self.deltas[0]
        return Delta(
            index=self.deltas[0].index,
            content="".join(d.content for d in self.deltas),
            reasoning="".join(d.reasoning for d in self.deltas),
            tool_calls=_joined_calls([c for d in self.deltas for c in d.tool_calls]),
            logprobs=[p for d in self.deltas for p in d.logprobs],
        )


def _joined_calls(pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """A piece with a name begins a new call."""
    calls: list[list[ToolCallDelta]] = []
    for piece in pieces:
        begins = piece.id is not None or piece.name is not None
        if begins or not calls or calls[-1][0].index != piece.index:
            calls.append([])
        calls[-1].append(piece)
    return [
        call[0].model_copy(update={"arguments": "".join(piece.arguments for piece in call)})
        for call in calls
    ]


def _first_kind(delta: Delta) -> int:
    """Reasoning precedes content and calls."""
    return 0 if delta.reasoning else 1 if delta.content else 2 if delta.tool_calls else 0


def _last_kind(delta: Delta) -> int:
    return 2 if delta.tool_calls else 1 if delta.content else 0
