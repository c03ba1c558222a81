"""Streams beside a bad request, or a client that leaves, are answered as if they were alone.

The server's answer to the bad request is only reported: one server refuses what another accepts.
The bad request is sent once every stream has begun. Then the server gets one more question.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_provider.errors import RequestFailed
from peers import HELLO, both, questions
from servers import Answer, Messages

from .begun import Begun
from .plan import Plan, Subject
from .rows import Row, Rows
from .sides import Side, in_turn

STREAMS = 4
LONGER = 2
"""Times the usual answer's tokens of the streams: they should outlast the bad request."""
NO_IMAGE = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg=="
BAD: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "no messages": ([], {}),
    "a role that is none": ([{"role": "nobody", "content": "Hello"}], {}),
    "temperature -4": (HELLO, {"temperature": -4}),
    "a broken image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": NO_IMAGE}}]}],
        {},
    ),
    "a schema that is none": (
        HELLO,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "none", "strict": True, "schema": {"type": "nothing"}},
            }
        },
    ),
}
"""Messages, and what else the request says."""
LEAVES = "a client that leaves"
TOO_LATE = "after the streams had ended"
"""Nothing was proven then: longer answers are needed."""


def measure(plan: Plan, subject: Subject, sides: Sequence[Side]) -> Iterator[list[Row]]:
    rows = Rows("isolation", subject)
    asked = questions("isolation", STREAMS, 0, plan.words)
    for turn in range(plan.rounds):
        for side in in_turn(sides, turn):
            side.revive()
            alone = side.alone(asked, LONGER * plan.reply)
            for case, disturb in disturbances(plan).items():
                side.revive()
                row = rows(f"beside {case}", side.name)
                _disturbed(row, side, Crowd(asked, alone, plan), disturb)
    yield rows.all()


@dataclass(frozen=True)
class Crowd:
    """Streams, and the answer that each gets alone."""

    asked: Sequence[Messages]
    alone: Sequence[Answer]
    plan: Plan

    @property
    def reply(self) -> int:
        return LONGER * self.plan.reply


Disturbance = Callable[[Side], str]
"""What was answered."""


def disturbances(plan: Plan) -> dict[str, Disturbance]:
    bad = {case: partial(_bad, messages, said) for case, (messages, said) in BAD.items()}
    leaver = questions("leaves", 1, 0, plan.words)[0]
    return {**bad, LEAVES: partial(_leaves, leaver, plan.reply)}


def _disturbed(row: Row, side: Side, crowd: Crowd, disturb: Disturbance) -> None:
    if side.given_up:
        row.count(side.together(crowd.asked, crowd.reply))
        return
    begun = Begun(len(crowd.asked))
    together, (summary, at) = both(
        lambda: begun.ended(side.together(crowd.asked, crowd.reply, heard=begun.heard)),
        lambda: _once(begun, crowd.plan.limit, side, disturb),
    )
    row.count([*together, *(answer for answer in crowd.alone if answer.failure)])
    row.hold(together, crowd.alone)
    row.notes["answered"] = summary if at < begun.end else f"{summary}, {TOO_LATE}"
    (after,) = side.alone([HELLO], 2)
    row.notes["afterwards"] = after.failure or "answers"


def _once(begun: Begun, limit: float, side: Side, disturb: Disturbance) -> tuple[str, float]:
    """The answer, and when it came."""
    begun.wait(limit)
    try:
        summary = disturb(side)
    except RequestFailed as error:
        summary = error.message[:80]
    return summary, time.perf_counter()


def _bad(messages: Any, said: dict[str, Any], side: Side) -> str:
    status, _ = side.client.status(messages, said)
    return str(status)


def _leaves(messages: Messages, reply: int, side: Side) -> str:
    left = side.client.try_ask(messages, reply, heard=lambda: False)
    return left.failure or "left after the first token"
