"""Errors in the form of OpenAI.

The events of one request, gathered until the last one.

The engine's events as one `chat.completion` or `text_completion`.

The engine's events as a stream of `chat.completion.chunk` or `text_completion`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ...errors import ContextTooLong, MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Failed, Finish
from .. import replies
from ..body import json_bytes
from ..replies import Streamed
from .answer import (
    Answer,
    WholeCalls,
    delta_parts,
    finish_reason,
    logprobs_of,
    text_logprobs,
    usage_of,
)
from .prompts import AnswerForm

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
CONTEXT = "This model's maximum context length is exceeded: "
"""By these words LiteLLM knows a `ContextWindowExceededError` (1.106.2,
`is_error_str_context_window_exceeded`)."""


def error_body(error: MLXProviderError) -> dict[str, Any]:
    other = "invalid_request_error" if error.status < 500 else "server_error"
    words = CONTEXT if isinstance(error, ContextTooLong) else ""
    return {
        "error": {
            "message": words + error.message,
            "type": TYPES.get(error.status, other),
            "param": error.param,
            "code": error.code,
        }
    }


class Collected:
    def __init__(self, form: AnswerForm) -> None:
        self.form = form
        self.done: Done | None = None
        self._answers: dict[int, Answer] = {}

    def feed(self, events: Iterable[Event]) -> None:
        """Raises the error of a `Failed` event."""
        for event in events:
            if isinstance(event, Failed):
                raise event.error.exception()
            self.take(event)

    def take(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._answer(event.index).add(event)
        elif isinstance(event, Finish):
            self._answer(event.index).finish = event
        elif isinstance(event, Done):
            self.done = event

    def answers(self) -> list[Answer]:
        answers = [self._answers[index] for index in sorted(self._answers)]
        best = self.form.best_of
        return answers if best is None else best.chosen(answers)

    def _answer(self, index: int) -> Answer:
        return self._answers.setdefault(index, Answer())


def head(accepted: Accepted, form: AnswerForm, *, chunk: bool = False) -> dict[str, Any]:
    kind = "text_completion" if form.text else "chat.completion" + ".chunk" * chunk
    return {
        "id": f"{'cmpl' if form.text else 'chatcmpl'}-{accepted.id}",
        "object": kind,
        "created": int(time.time()),
        "model": accepted.model,
    }


class Whole(replies.Whole):
    def __init__(self, accepted: Accepted, form: AnswerForm) -> None:
        self._head = head(accepted, form)
        self._form = form
        self._collected = Collected(form)

    def _take(self, event: Event) -> None:
        self._collected.take(event)

    def _body(self, done: Done) -> dict[str, Any]:
        choices = [self._choice(*each) for each in enumerate(self._collected.answers())]
        usage = usage_of(done, timings=self._form.timings)
        return self._head | {"choices": choices, "usage": usage}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        legacy = self._form.legacy
        message = answer.message(legacy=legacy, custom=self._form.custom)
        if self._form.text:
            said = {"text": message["content"], "logprobs": text_logprobs(answer.logprobs)}
        else:
            message |= {"refusal": None, "annotations": []}  # OpenAI's schema requires the first
            said = {"message": message, "logprobs": logprobs_of(answer.logprobs)}
        return {"index": index, **said, "finish_reason": answer.reason(legacy=legacy)}


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
        yield replies.data(error_body(error))

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
        return [replies.data(self._head | usage), DONE] if self._usage else [DONE]

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
