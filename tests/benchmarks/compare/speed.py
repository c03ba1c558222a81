"""Time to first token, pace of a stream, throughput of all, by the number of streams."""

import time
from collections.abc import Iterator, Sequence
from statistics import median

from peers import Run, questions
from servers import Messages

from .plan import Plan, Subject
from .progress import say
from .rows import Row, Rows
from .sides import Side, in_turn

WARMING = 4
"""Tokens of the answers before those that count: kernels are compiled for new shapes."""


def measure(plan: Plan, subject: Subject, sides: Sequence[Side]) -> Iterator[list[Row]]:
    for count in plan.streams:
        rows = Rows("speed", subject)
        say(f"  streams: {count}")
        for side in sides:
            side.revive()
            side.together(questions("warming", count, 0, plan.words), WARMING)
        for turn in range(plan.rounds):
            asked = questions("speed", count, turn, plan.words)
            for side in in_turn(sides, turn):
                row = rows(f"{count} stream{'s' * (count > 1)}", side.name)
                _add(row, _run(side, asked, plan.reply))
        yield rows.all()


def _run(side: Side, asked: Sequence[Messages], reply: int) -> Run:
    began = time.perf_counter()
    answers = side.together(asked, reply)
    return Run(answers, time.perf_counter() - began)


def _add(row: Row, run: Run) -> None:
    """A round with a refused request has no figures, because fewer streams are another case."""
    row.count(run.answers)
    whole = not any(answer.failure for answer in run.answers)
    row.add("throughput", run.rate if whole else None)
    row.add("first_token", run.first if whole else None)
    paces = [answer.pace for answer in run.answers if answer.tokens > 1]
    row.add("pace", median(paces) if whole and paces else None)
