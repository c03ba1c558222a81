"""The engine's events as a stream of `chat.completion.chunk` or `text_completion`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ...errors import MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Finish
from .. import sse
from ..asked import json_bytes
from ..replies import Streamed
from .answer import delta_parts, finish_reason, logprobs_of, text_logprobs, usage_of
from .custom_tools import WholeCalls
from .errors import error_body
from .form import AnswerForm
from .whole import head

DONE = b"data: [DONE]\n\n"


class Stream(Streamed):
    def __init__(self, accepted: Accepted, form: AnswerForm, *, usage: bool) -> None:
        """`usage`: end with a chunk of usage (`stream_options.include_usage`)."""
        self._form = form
        self._head = head(accepted, form, chunk=True) | ({"usage": None} if usage else {})
        self._begin = b"data: " + json_bytes(self._head)[:-1] + b',"choices":['
        self._usage = usage
        self._calls = WholeCalls(form.custom)
        self._spoken: set[int] = set()
        self._written: Counter[int] = Counter()
        """Characters per choice with log-probabilities sent."""

    def _frames(self, event: Event) -> Iterable[bytes]:
        if not self._form.custom:
            return self._chunks(event)
        return chain.from_iterable(map(self._chunks, self._calls.of(event)))

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        yield sse.data(error_body(error))

    def _chunks(self, event: Event) -> list[bytes]:
        if isinstance(event, Delta):
            return self._text(event) if self._form.text else self._chat(event)
        if isinstance(event, Finish):
            reason = finish_reason(event, legacy=self._form.legacy)
            part: dict[str, Any] = {"text": ""} if self._form.text else self._delta(event.index, {})
            return [self._chunk(event.index, part, None, reason)]
        if not isinstance(event, Done):
            return []
        usage = {"choices": [], "usage": usage_of(event, timings=self._form.timings)}
        return [sse.data(self._head | usage), DONE] if self._usage else [DONE]

    def _chat(self, event: Delta) -> list[bytes]:
        form, index = self._form, event.index
        parts = delta_parts(event, legacy=form.legacy, custom=form.custom)
        logprobs = logprobs_of(event.logprobs)
        if logprobs is None:
            return [self._chunk(index, self._delta(index, part), None) for part in parts]
        first, *others = parts or [{"content": ""}]
        return [
            self._chunk(index, self._delta(index, first), logprobs),
            *(self._chunk(index, self._delta(index, part), None) for part in others),
        ]

    def _text(self, event: Delta) -> list[bytes]:
        begins = self._written[event.index]
        self._written[event.index] += sum(len(token.token) for token in event.logprobs)
        logprobs = text_logprobs(event.logprobs, begins)
        return [self._chunk(event.index, {"text": event.content}, logprobs)]

    def _delta(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        if index in self._spoken:
            return {"delta": part}
        self._spoken.add(index)
        return {"delta": {"role": "assistant", **part}}

    def _chunk(
        self,
        index: int,
        part: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None = None,
    ) -> bytes:
        choice = {"index": index, **part, "logprobs": logprobs, "finish_reason": reason}
        return self._begin + json_bytes(choice) + b"]}\n\n"
