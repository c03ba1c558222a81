"""Time to first token of a long prompt, and of prompts with the same beginning; also with images.

Requests about a document: the first one, the same again, another question, the next turn of the
conversation. Requests about an image: the first one, the same again, another question, the image
before another document. Each round has its own documents and images.
"""

from collections.abc import Iterator, Sequence

from mlx_provider_bench.model_speed import document
from peers import Asked, messages_of
from servers import Answer, Messages

from .plan import Plan, Subject
from .rows import Row, Rows
from .sides import Side, in_turn

REPLY = 8
"""Tokens of an answer: time counts until the first."""
QUESTIONS = ("Which colour is the circle?", "And what is the weather like in Paris today?")
BESIDE_IMAGE = 5
"""The part of the long prompt's words that stands behind an image."""


def measure(plan: Plan, subject: Subject, sides: Sequence[Side]) -> Iterator[list[Row]]:
    rows = Rows("reuse", subject)
    for turn in range(plan.rounds):
        for side in in_turn(sides, turn):
            _prefix(rows, side, Asked(document(f"prefix {turn}", plan.prompt), QUESTIONS[0]))
    yield rows.all()
    if subject.sees:
        rows = Rows("reuse", subject)
        for turn in range(plan.rounds):
            for side in in_turn(sides, turn):
                _image(rows, side, plan, turn)
        yield rows.all()


def _prefix(rows: Rows, side: Side, base: Asked) -> None:
    def ask(case: str, asked: Asked) -> Answer:
        return _timed(rows(f"prompt, {case}", side.name), side, messages_of(asked))

    first = ask("first time", base)
    again = ask("once more", base)
    rows("prompt, once more", side.name).hold([again], [first])
    ask("other question", base.asking(QUESTIONS[1]))
    ask("next turn", base.followed_by(first.text, QUESTIONS[1]))


def _image(rows: Rows, side: Side, plan: Plan, turn: int) -> None:
    """A side that takes no images has one row, which says so."""
    if not side.images:
        rows("image, first time", side.name).notes["images"] = "takes none"
        return
    words = max(20, plan.prompt // BESIDE_IMAGE)
    text, seed = document(f"image {turn}", words), 1000 + turn
    base = Asked(text, QUESTIONS[0], image=seed, image_edge=plan.edge)
    there = Asked(document(f"elsewhere {turn}", words), QUESTIONS[0], seed, plan.edge)

    def ask(case: str, asked: Asked) -> Answer:
        return _timed(rows(f"image, {case}", side.name), side, messages_of(asked))

    first = ask("first time", base)
    again = ask("once more", base)
    rows("image, once more", side.name).hold([again], [first])
    ask("other question", base.asking(QUESTIONS[1]))
    ask("other document", there)


def _timed(row: Row, side: Side, messages: Messages) -> Answer:
    (answer,) = side.alone([messages], REPLY)
    row.count([answer])
    row.add("first_token", None if answer.failure else answer.first)
    if answer.prompt:
        row.notes["reused"] = f"{answer.cached} of {answer.prompt}"
    return answer
