"""Reasoning formats: a parser with any text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ...chat.output.whole_reply import WholeReply, read_chunks
from ...records import ReasoningParser
from .check import Check, NotApplicable, demand, same
from .examples import cut, for_examples
from .texts import FRAGMENTS, replies
from .work import bounded

WORK = 30.0
"""Reading each character once takes a fraction of a second."""
LONG = 24_000
PIECE = 12
OPEN = (None, True, False)
"""Whether the prompt ended inside a thought; `None`: unknown."""


def _read(parser: ReasoningParser, chunks: Sequence[str], is_open: bool | None) -> WholeReply:
    return read_chunks(chunks, reasoning_parser=parser, reasoning_open=is_open)


def any_chunking(parser: ReasoningParser) -> None:
    def check(given: tuple[str, list[int], bool | None]) -> None:
        text, sizes, is_open = given
        whole = _read(parser, [text], is_open)
        demand(not whole.faults, f"the parser fails on {text!r}: {'; '.join(whole.faults)}")
        for chunks in (list(text), cut(text, sizes)):
            found = _read(parser, chunks, is_open)
            same(found, whole, f"{text!r} reads otherwise in the pieces {chunks[:40]}")

    cuts = st.lists(st.integers(0, 12), max_size=40)
    texts = replies(parser.visible())
    for_examples(st.tuples(texts, cuts, st.sampled_from(OPEN)), 60, check, shrinks=True)


def plain_answers(parser: ReasoningParser) -> None:
    if parser.whole is not None:
        raise NotApplicable("the format addresses every message: there is no answer without marks")

    def check(parts: list[str]) -> None:
        text = "".join(parts)
        if any(marker in text for marker in parser.visible() if len(marker) > 2):
            return
        for chunks in ([text], list(text)):
            found = _read(parser, chunks, False)
            same((found.content, found.reasoning), (parser.prefix + text, ""), f"{text!r} changes")

    for_examples(st.lists(st.sampled_from(FRAGMENTS), max_size=12), 60, check, shrinks=True)


def thoughts_and_answer(parser: ReasoningParser) -> None:
    if parser.whole is not None or not parser.start or not parser.end:
        raise NotApplicable("its thoughts do not stand between two markers")
    text = f"{parser.start}{parser.header}\nfirst this\n{parser.end}\n\nthen that"
    found = _read(parser, [text], False)
    same((found.reasoning.strip(), found.content.strip()), ("first this", "then that"), repr(text))
    begun = f"first this\n{parser.end}\n\nthen that"
    found = _read(parser, [begun], True)
    same((found.reasoning.strip(), found.content.strip()), ("first this", "then that"), repr(begun))


def cut_replies(parser: ReasoningParser) -> None:
    words = ("alpha", "beta", "gamma")
    text = f"{parser.start}{parser.header}\nalpha beta\n{parser.end}\n\ngamma"
    for end in range(len(text) + 1):
        for is_open in OPEN:
            found = _read(parser, [text[:end]], is_open)
            left = f"{found.reasoning!r} and {found.content!r}"
            summary = f"of the cut reply {text[:end]!r} {left} are left"
            demand(not found.faults, f"the parser fails on {text[:end]!r}: {found.faults}")
            kept = found.reasoning + found.content
            demand(all(w in kept for w in words if w in text[:end]), f"text is lost: {summary}")


def bombs(parser: ReasoningParser) -> None:
    bodies = [marker * 2000 for marker in parser.visible()]
    bodies += [(parser.start + parser.end) * 1000, parser.start + "lorem < ipsum " * (LONG // 14)]
    for body in bodies:
        for is_open in OPEN:
            with bounded(WORK, f"{body[:60]!r}... of {len(body)} characters"):
                chunks = [body[at : at + PIECE] for at in range(0, len(body), PIECE)]
                found = _read(parser, chunks, is_open)
            demand(not found.faults, f"the parser fails on {body[:80]!r}...: {found.faults}")


CHECKS: tuple[Check[ReasoningParser], ...] = (
    Check("any chunking", "A reply reads the same however its text is cut.", any_chunking),
    Check("plain answers", "An answer without markers arrives unchanged.", plain_answers),
    Check(
        "thoughts and answer",
        "What stands between the markers is the thought, what follows the answer; also where the "
        "prompt has opened the thought.",
        thoughts_and_answer,
    ),
    Check(
        "cut replies",
        "A reply that ends anywhere raises nothing, and no word of it is lost.",
        cut_replies,
    ),
    Check("bombs", "Size costs bounded work, and raises nothing.", bombs),
)
