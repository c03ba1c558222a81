"""Converts parts of OpenAI's replies to LiteLLM's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from litellm.types.utils import (
    ChoiceLogprobs,
    CompletionTokensDetailsWrapper,
    PromptTokensDetailsWrapper,
)
from litellm.types.utils import Usage as LiteLLMUsage

from ..protocol.events import Done, TokenLogprob
from ..wire.openai import answer


def usage_of(done: Done, *, timings: bool = False) -> LiteLLMUsage:
    fields = answer.usage_of(done, timings=timings)
    return LiteLLMUsage(
        **{
            **fields,
            "prompt_tokens_details": PromptTokensDetailsWrapper(**fields["prompt_tokens_details"]),
            "completion_tokens_details": CompletionTokensDetailsWrapper(
                **fields["completion_tokens_details"]
            ),
        }
    )


class OurLogprobs(ChoiceLogprobs):
    """See `patches`."""

    ours: ClassVar[bool] = True


def logprobs_of(tokens: Sequence[TokenLogprob]) -> OurLogprobs | None:
    fields = answer.logprobs_of(tokens)
    return None if fields is None else OurLogprobs(**fields)
