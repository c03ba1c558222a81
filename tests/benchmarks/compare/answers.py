"""Whether requests in a batch get the answers that each gets alone, on the same server.

Half of the rounds ask together first and then one by one, the other half in the opposite order, so
that neither always finds its prompts in a prefix cache.
"""

from collections.abc import Iterator, Sequence

from peers import questions

from .plan import Plan, Subject
from .progress import say
from .rows import Row, Rows
from .sides import Side, in_turn

CASES = {"at once": 0.0, "one after another": 0.15}
"""Seconds between arrivals: rows that start together, and rows that join those that decode."""


def measure(plan: Plan, subject: Subject, sides: Sequence[Side]) -> Iterator[list[Row]]:
    for case, apart in CASES.items():
        rows = Rows("answers", subject)
        say(f"  {plan.crowd} {case}")
        for turn in range(plan.rounds):
            asked = questions(f"answers {case}", plan.crowd, turn, plan.words)
            for side in in_turn(sides, turn):
                side.revive()
                alone = side.alone(asked, plan.reply) if turn % 2 else None
                together = side.together(asked, plan.reply, apart=apart)
                alone = alone or side.alone(asked, plan.reply)
                row = rows(f"{plan.crowd} {case}", side.name)
                row.count([*together, *alone])
                row.hold(together, alone)
        yield rows.all()
