"""The choices with the highest log-probability per token."""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

from litellm.types.utils import Choices, ModelResponse


@dataclass(frozen=True)
class BestOf:
    """`made` choices of each prompt, of which the best `wanted` are returned."""

    made: int
    wanted: int
    logprobs: bool
    """Whether the client asked for log-probabilities, too."""

    def chosen(self, response: ModelResponse) -> ModelResponse:
        """The response with the best choices of each prompt, the best first."""
        groups = range(0, len(response.choices), self.made)
        kept = [each for at in groups for each in self._best(response.choices[at : at + self.made])]
        for index, choice in enumerate(kept):
            choice.index = index
            if not self.logprobs:
                choice.logprobs = None
        response.choices = kept
        return response

    def _best(self, choices: list[Choices]) -> list[Choices]:
        return sorted(choices, key=_per_token, reverse=True)[: self.wanted]


def _per_token(choice: Choices) -> float:
    """The mean; an empty choice counts as certain."""
    given = getattr(choice, "logprobs", None)
    found = given.text_lists["token_logprobs"] if given is not None else []
    return fsum(found) / len(found) if found else 0.0
