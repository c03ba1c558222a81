"""The engine's events as one finished LiteLLM response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from litellm.types.utils import (
    Choices,
    EmbeddingResponse,
    Message,
    ModelResponse,
    TextCompletionResponse,
)

from ..protocol.events import Accepted, Delta, Done, Event, Failed, Finish, TokenLogprob
from .best_of import BestOf
from .replies import AnswerForm, finish_reason, logprobs_of, usage_of
from .text import text_logprobs, with_logprobs
from .warned import HEADER, header_text


@dataclass
class Answer:
    """The reply of one choice so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            call = self.calls.setdefault(
                piece.index,
                {"id": piece.id, "type": "function", "function": {"name": None, "arguments": ""}},
            )
            call["id"] = call["id"] or piece.id
            call["function"]["name"] = call["function"]["name"] or piece.name
            call["function"]["arguments"] += piece.arguments

    def message(self, *, legacy: bool) -> Message:
        """The message; `content` is null if there are only calls."""
        calls = [self.calls[index] for index in sorted(self.calls)]
        content = "".join(self.content)
        fields: dict[str, Any] = {"role": "assistant"}
        fields["content"] = None if calls and not content else content
        if calls and legacy:
            fields["function_call"] = calls[0]["function"]
        elif calls:
            fields["tool_calls"] = calls
        if reasoning := "".join(self.reasoning):
            fields["reasoning_content"] = reasoning
        return Message(**fields)


class Collector:
    """See `streams.Collects`."""

    def __init__(self, accepted: Accepted, form: AnswerForm, best_of: BestOf | None = None) -> None:
        self._accepted = accepted
        self._form = form
        self._best_of = best_of
        self._logprobs = text_logprobs if form.text else logprobs_of
        self._answers: dict[int, Answer] = {}
        self._done: Done | None = None

    @property
    def ended(self) -> bool:
        return self._done is not None

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Delta):
                self._answer(event.index).add(event)
            elif isinstance(event, Finish):
                self._answer(event.index).finish = event
            elif isinstance(event, Done):
                self._done = event
            elif isinstance(event, Failed):
                raise event.error.exception()

    def fill(self, response: ModelResponse, model: str) -> ModelResponse | TextCompletionResponse:
        assert self._done is not None  # noqa: S101  (a caller's mistake, not an input's)
        response.choices = [
            self._choice(index, self._answers[index]) for index in sorted(self._answers)
        ]
        response.model = model
        response.usage = usage_of(self._done, timings=self._form.timings)
        timings = self._done.timings.model_dump()
        response.timings = timings
        rate = {"x-mlx-tokens-per-second": f"{timings['tokens_per_second']:.1f}"}
        hidden = with_headers(response, self._accepted.warnings, rate)
        hidden["timings"] = timings
        chosen = response if self._best_of is None else self._best_of.chosen(response)
        return with_logprobs(chosen) if self._form.text else chosen

    def _answer(self, index: int) -> Answer:
        return self._answers.setdefault(index, Answer())

    def _choice(self, index: int, answer: Answer) -> Choices:
        finish = answer.finish or Finish(index=index, reason="stop")
        return Choices(
            index=index,
            finish_reason=finish_reason(finish, legacy=self._form.legacy),
            message=answer.message(legacy=self._form.legacy),
            logprobs=self._logprobs(answer.logprobs),
        )


def with_headers(
    response: ModelResponse | EmbeddingResponse, warnings: Sequence[str], headers: Mapping[str, str]
) -> dict[str, Any]:
    """Have a response answered with headers, and with one for its warnings; where they stand."""
    told = {HEADER: header_text("; ".join(warnings))} if warnings else {}
    hidden: dict[str, Any] = response._hidden_params  # noqa: SLF001  (where LiteLLM takes them from)
    known = hidden.get("additional_headers") or {}
    hidden["additional_headers"] = {**known, **headers, **told}
    return hidden
