"""What LiteLLM's conversion of chat to text completions would lose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

from litellm.main import TextCompletionStreamWrapper
from litellm.types.utils import (
    ChoiceLogprobs,
    Choices,
    Logprobs,
    ModelResponse,
    ModelResponseStream,
    TextChoices,
    TextCompletionResponse,
)

from ..protocol.events import TokenLogprob

ATTRIBUTE = "text_lists"


class TextFinish(ModelResponseStream):
    """The finish of a choice beside an empty choice 0, in a text stream.

    LiteLLM's text stream looks at the first choice alone, by item (1.106.2 and 1.109.1,
    `TextCompletionStreamWrapper`), its chat stream at attributes, where a finish in the first
    choice would end the stream: by item the choice that ends comes first.
    """

    def __getitem__(self, key: str) -> Any:
        return self.choices[1:] if key == "choices" else getattr(self, key)


class TextLogprobs(ChoiceLogprobs):
    """As text completions tell them."""

    text_lists: dict[str, Any]


def share_logprobs() -> None:
    """Let LiteLLM's text stream take over log-probabilities of our chunks. Idempotent.

    It makes an object of its own of each chunk and leaves them out (1.106.2 and 1.109.1,
    `TextCompletionStreamWrapper.convert_to_text_completion_object`).
    """
    original = TextCompletionStreamWrapper.convert_to_text_completion_object
    if hasattr(original, ATTRIBUTE):
        return

    @wraps(original)
    def convert(self: Any, chunk: Any) -> Any:
        converted = original(self, chunk)
        for choice, ours in zip(converted.choices, chunk["choices"], strict=False):
            given = getattr(ours, "logprobs", None)
            found = getattr(given, ATTRIBUTE, None)  # by name: a module may run twice
            if found is not None:
                choice.logprobs = Logprobs(**found)
        return converted

    setattr(convert, ATTRIBUTE, True)
    TextCompletionStreamWrapper.convert_to_text_completion_object = convert


def with_logprobs(response: ModelResponse) -> ModelResponse | TextCompletionResponse:
    """The response as LiteLLM lets it through with its log-probabilities, where it has some.

    Its own conversion fills in none (1.106.2, `convert_chat_to_text_completion`), but what is a
    text completion already passes unchanged.
    """
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
    given = getattr(choice, "logprobs", None)  # LiteLLM deletes what is null
    return getattr(given, ATTRIBUTE, None)


def text_logprobs(tokens: Sequence[TokenLogprob], begins: int = 0) -> TextLogprobs | None:
    """Lists of equal length; `text_offset` counts characters from the choice's beginning, of
    which `begins` stand before these tokens. `None` where none were asked for."""
    if not tokens:
        return None
    offsets = [begins]
    for token in tokens:
        offsets.append(offsets[-1] + len(token.token))
    lists = {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {t.token: t.logprob for t in token.top}
            for token in tokens
        ],
        "text_offset": offsets[:-1],
    }
    return TextLogprobs(text_lists=lists)
