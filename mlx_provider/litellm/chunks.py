"""The engine's events as the chunks of a LiteLLM stream. Rules of litellm 1.106.2,
`CustomStreamWrapper`: usage comes before a finish chunk, which contains nothing else. The finish of
choice 0 ends the stream, so it is held until every choice has ended. The finish of another choice
is the second entry beside an empty choice 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from litellm.types.utils import ChoiceLogprobs, ModelResponseStream, StreamingChoices
from litellm.types.utils import Delta as LiteLLMDelta

from ..protocol.events import Delta, Done, Event, Failed, Finish
from ..wire.openai.answer import delta_parts, finish_reason
from ..wire.openai.custom_tools import WholeCalls
from ..wire.openai.form import AnswerForm
from .replies import logprobs_of, usage_of
from .text import TextFinish, text_logprobs


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
