"""The engine's events as a stream of `chat.completion.chunk` or `text_completion`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ...errors import MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Finish
from .. import sse
from ..replies import Streamed
from .answer import delta_parts, finish_reason, logprobs_of, text_logprobs, usage_of
from .custom_tools import WholeCalls
from .errors import error_body
from .form import AnswerForm
from .whole import head

DONE = b"data: [DONE]\n\n"


class Stream(Streamed):
    def __init__(self, accepted: Accepted, form: AnswerForm, *, usage: bool) -> None:
        """`usage`: add a last chunk with the usage (`stream_options.include_usage`)."""
        self._form = form
        self._head = head(accepted, form, chunk=True) | ({"usage": None} if usage else {})
        self._usage = usage
        self._calls = WholeCalls(form.custom)
        self._spoken: set[int] = set()
        self._written: Counter[int] = Counter()
        """Characters of each choice for which log-probabilities were sent."""

    def _frames(self, event: Event) -> Iterator[bytes]:
        for each in self._calls.of(event):
            yield from map(sse.data, self._chunks(each))
        if isinstance(event, Done):
            yield DONE

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        yield sse.data(error_body(error))

    def _chunks(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Delta):
            yield from self._text(event) if self._form.text else self._chat(event)
        elif isinstance(event, Finish):
            reason = finish_reason(event, legacy=self._form.legacy)
            part: dict[str, Any] = {"text": ""} if self._form.text else self._delta(event.index, {})
            yield self._chunk(event.index, part, None, reason)
        elif isinstance(event, Done) and self._usage:
            usage = usage_of(event, timings=self._form.timings)
            yield self._head | {"choices": [], "usage": usage}

    def _chat(self, event: Delta) -> Iterator[dict[str, Any]]:
        form = self._form
        parts = list(delta_parts(event, legacy=form.legacy, custom=form.custom))
        logprobs = logprobs_of(event.logprobs)
        if logprobs is not None and not parts:
            parts = [{"content": ""}]
        for part in parts:
            yield self._chunk(event.index, self._delta(event.index, part), logprobs)
            logprobs = None

    def _text(self, event: Delta) -> Iterator[dict[str, Any]]:
        begins = self._written[event.index]
        self._written[event.index] += sum(len(token.token) for token in event.logprobs)
        logprobs = text_logprobs(event.logprobs, begins)
        yield self._chunk(event.index, {"text": event.content}, logprobs)

    def _delta(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        role = {} if index in self._spoken else {"role": "assistant"}
        self._spoken.add(index)
        return {"delta": {**role, **part}}

    def _chunk(
        self,
        index: int,
        part: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"choices": [choice]}
