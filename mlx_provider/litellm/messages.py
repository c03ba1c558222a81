"""Data that LiteLLM's conversion of chat to text completions would lose.

Converts parts of OpenAI's replies to LiteLLM's objects.

The engine's events as the chunks of a LiteLLM stream. Rules of litellm 1.106.2,
`CustomStreamWrapper`: usage comes before a finish chunk, which contains nothing else. The finish of
choice 0 ends the stream, so it is held until every choice has ended. The finish of another choice
is the second entry beside an empty choice 0.

Collects the events of the engine in one complete LiteLLM response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from litellm.types.utils import (
    ChoiceLogprobs,
    Choices,
    CompletionTokensDetailsWrapper,
    EmbeddingResponse,
    Message,
    ModelResponse,
    ModelResponseStream,
    PromptTokensDetailsWrapper,
    StreamingChoices,
    TextChoices,
    TextCompletionResponse,
)
from litellm.types.utils import Delta as LiteLLMDelta
from litellm.types.utils import Usage as LiteLLMUsage

from ..protocol.events import Accepted, Delta, Done, Event, Failed, Finish, TokenLogprob
from ..wire.openai import answer
from ..wire.openai.answer import Answer, WholeCalls, delta_parts, finish_reason
from ..wire.openai.prompts import AnswerForm
from ..wire.openai.stream import Collected
from ..wire.replies import HEADER, header_text

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


class ChunkStream:
    def __init__(
        self,
        reply_id: str,
        model: str,
        created: int,
        form: AnswerForm = AnswerForm(),  # noqa: B008  (frozen)
    ) -> None:
        self._id = f"chatcmpl-{reply_id}"
        self._model = model
        self._form = form
        self._detail = TextFinish if form.text else ModelResponseStream
        self._written: Counter[int] = Counter()
        """Characters per choice of a text with log-probabilities sent."""
        self._created = created
        self._calls = WholeCalls(form.custom)
        self._spoken: set[int] = set()
        self._finish = "stop"
        self.ended = False

    def feed(self, events: Iterable[Event]) -> Iterator[ModelResponseStream]:
        """Raises the error of a `Failed` event."""
        for event in chain.from_iterable(map(self._calls.of, events)):
            if isinstance(event, Delta):
                yield from self._delta(event)
            elif isinstance(event, Finish):
                yield from self._finished(event)
            elif isinstance(event, Done):
                self.ended = True
                yield self._chunk(
                    [self._choice()], usage=usage_of(event, timings=self._form.timings)
                )
                yield self._chunk([StreamingChoices(index=0, finish_reason=self._finish)])
            elif isinstance(event, Failed):
                self.ended = True
                raise event.error.exception()

    def empty(self) -> ModelResponseStream:
        return self._chunk([self._choice(part={"content": ""})])

    def _delta(self, event: Delta) -> Iterator[ModelResponseStream]:
        """One chunk per kind of output, because clients read one kind at a time."""
        logprobs = self._logprobs(event)
        form = self._form
        for part in delta_parts(event, legacy=form.legacy, custom=form.custom):
            choice = self._choice(event.index, part)
            if logprobs is not None:  # assigning to LiteLLM's objects takes microseconds
                choice.logprobs, logprobs = logprobs, None
            yield self._chunk([choice])
        if logprobs is not None:
            choice = self._choice(event.index, {"content": ""})
            choice.logprobs = logprobs
            yield self._chunk([choice])

    def _logprobs(self, event: Delta) -> ChoiceLogprobs | None:
        if not self._form.text:
            return logprobs_of(event.logprobs)
        begins = self._written[event.index]
        self._written[event.index] += sum(len(token.token) for token in event.logprobs)
        return text_logprobs(event.logprobs, begins)

    def _finished(self, event: Finish) -> Iterator[ModelResponseStream]:
        reason = finish_reason(event, legacy=self._form.legacy)
        if event.index == 0:
            self._finish = reason
            return
        other = StreamingChoices(
            index=event.index, finish_reason=reason, delta=LiteLLMDelta(content="")
        )
        yield self._chunk([self._choice(), other], self._detail)

    def _choice(self, index: int = 0, part: dict[str, Any] | None = None) -> StreamingChoices:
        delta = LiteLLMDelta(**(part or {}))
        if index not in self._spoken:  # LiteLLM adds no role on this path
            self._spoken.add(index)
            delta.role = "assistant"
        return StreamingChoices(index=index, delta=delta)

    def _chunk(
        self,
        choices: list[StreamingChoices],
        kind: type[ModelResponseStream] = ModelResponseStream,
        **more: Any,
    ) -> ModelResponseStream:
        return kind(id=self._id, created=self._created, model=self._model, choices=choices, **more)


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
