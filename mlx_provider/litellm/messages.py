"""Collects the events of the engine in one complete LiteLLM response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from litellm.types.utils import (
    Choices,
    EmbeddingResponse,
    Message,
    ModelResponse,
    TextCompletionResponse,
)

from ..protocol.events import Accepted, Event
from ..wire.openai.answer import Answer
from ..wire.openai.collected import Collected
from ..wire.openai.form import AnswerForm
from ..wire.warnings import HEADER, header_text
from .replies import logprobs_of, usage_of
from .text import text_logprobs, with_logprobs


class Collector:
    def __init__(self, accepted: Accepted, form: AnswerForm) -> None:
        self._accepted = accepted
        self._form = form
        self._collected = Collected(form)
        self._logprobs = text_logprobs if form.text else logprobs_of

    @property
    def ended(self) -> bool:
        return self._collected.done is not None

    def feed(self, events: Iterable[Event]) -> None:
        self._collected.feed(events)

    def fill(self, response: ModelResponse, model: str) -> ModelResponse | TextCompletionResponse:
        done = self._collected.done
        assert done is not None  # noqa: S101  (a caller's mistake, not an input's)
        response.choices = [
            self._choice(index, answer) for index, answer in enumerate(self._collected.answers())
        ]
        response.model = model
        response.usage = usage_of(done, timings=self._form.timings)
        timings = done.timings.model_dump()
        response.timings = timings
        rate = {"x-mlx-tokens-per-second": f"{timings['tokens_per_second']:.1f}"}
        hidden = with_headers(response, self._accepted.warnings, rate)
        hidden["timings"] = timings
        return with_logprobs(response) if self._form.text else response

    def _choice(self, index: int, answer: Answer) -> Choices:
        return Choices(
            index=index,
            finish_reason=answer.reason(legacy=self._form.legacy),
            message=Message(**answer.message(legacy=self._form.legacy, custom=self._form.custom)),
            logprobs=self._logprobs(answer.logprobs),
        )


def with_headers(
    response: ModelResponse | EmbeddingResponse, warnings: Sequence[str], headers: Mapping[str, str]
) -> dict[str, Any]:
    """Adds headers, with one for the warnings. Returns the mapping of headers."""
    added = {HEADER: header_text(warnings)} if warnings else {}
    hidden: dict[str, Any] = response._hidden_params  # noqa: SLF001  (where LiteLLM takes them from)
    known = hidden.get("additional_headers") or {}
    hidden["additional_headers"] = {**known, **headers, **added}
    return hidden
