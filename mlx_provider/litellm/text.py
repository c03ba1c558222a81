"""Data that LiteLLM's conversion of chat to text completions would lose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litellm.types.utils import (
    ChoiceLogprobs,
    Choices,
    ModelResponse,
    ModelResponseStream,
    TextChoices,
    TextCompletionResponse,
)

from ..protocol.events import TokenLogprob
from ..wire.openai import answer

TEXT_LISTS = "text_lists"
"""Attribute of our log-probabilities. By name: a module may run twice."""


class TextFinish(ModelResponseStream):
    """The finish of a choice beside an empty choice 0, in a text stream. LiteLLM's text stream
    reads the first choice by item (1.106.2 and 1.109.1, `TextCompletionStreamWrapper`), its chat
    stream by attribute, where a finish would end the stream. So the finished choice comes first
    only by item."""

    def __getitem__(self, key: str) -> Any:
        return self.choices[1:] if key == "choices" else getattr(self, key)


class TextLogprobs(ChoiceLogprobs):
    text_lists: dict[str, Any]


def with_logprobs(response: ModelResponse) -> ModelResponse | TextCompletionResponse:
    """LiteLLM's conversion drops log-probabilities (1.106.2, `convert_chat_to_text_completion`),
    but does not change a response that is a text completion."""
    if not any(_logprobs(choice) for choice in response.choices):
        return response
    text = TextCompletionResponse(
        id=response.id,
        created=response.created,
        model=response.model,
        choices=[_choice(choice) for choice in response.choices],
        usage=response.usage,
    )
    text._hidden_params = response._hidden_params  # noqa: SLF001  (where LiteLLM takes headers from)
    return text


def _choice(choice: Choices) -> TextChoices:
    return TextChoices(
        index=choice.index,
        text=choice.message.content,
        finish_reason=choice.finish_reason,
        logprobs=_logprobs(choice),
    )


def _logprobs(choice: Choices) -> dict[str, Any] | None:
    given = getattr(choice, "logprobs", None)  # LiteLLM deletes null fields
    return getattr(given, TEXT_LISTS, None)


def text_logprobs(tokens: Sequence[TokenLogprob], begins: int = 0) -> TextLogprobs | None:
    lists = answer.text_logprobs(tokens, begins)
    return None if lists is None else TextLogprobs(text_lists=lists)
