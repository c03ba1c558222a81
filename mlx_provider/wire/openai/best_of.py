"""The choices with the highest log-probability per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from .answer import Answer


@dataclass(frozen=True)
class BestOf:
    """`made` choices of each prompt, of which the best `wanted` are returned."""

    made: int
    wanted: int
    logprobs: bool

    def chosen(self, answers: Sequence[Answer]) -> list[Answer]:
        groups = range(0, len(answers), self.made)
        kept = [each for at in groups for each in self._best(answers[at : at + self.made])]
        if not self.logprobs:
            for answer in kept:
                answer.logprobs.clear()
        return kept

    def _best(self, answers: Sequence[Answer]) -> list[Answer]:
        return sorted(answers, key=_per_token, reverse=True)[: self.wanted]


def _per_token(answer: Answer) -> float:
    """The mean; an empty choice counts as certain."""
    found = [token.logprob or 0.0 for token in answer.logprobs]
    return fsum(found) / len(found) if found else 0.0
