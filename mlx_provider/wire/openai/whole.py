"""The engine's events as one `chat.completion` or `text_completion`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...protocol.events import Accepted, Event
from ..asked import JSON, json_bytes
from .answer import Answer, logprobs_of, text_logprobs, usage_of
from .collected import Collected
from .form import AnswerForm


def head(accepted: Accepted, form: AnswerForm, *, chunk: bool = False) -> dict[str, Any]:
    """The fields that a reply and each of its chunks begin with."""
    kind = "text_completion" if form.text else "chat.completion" + ".chunk" * chunk
    return {
        "id": f"{'cmpl' if form.text else 'chatcmpl'}-{accepted.id}",
        "object": kind,
        "created": int(time.time()),
        "model": accepted.model,
    }


class Whole:
    """See `asked.Reply`."""

    media_type = JSON
    heartbeat = b""
    streamed = False

    def __init__(self, accepted: Accepted, form: AnswerForm) -> None:
        self._head = head(accepted, form)
        self._form = form
        self._collected = Collected(form)

    def feed(self, events: Sequence[Event]) -> bytes:
        self._collected.feed(events)
        done = self._collected.done
        if done is None:
            return b""
        choices = [self._choice(*each) for each in enumerate(self._collected.answers())]
        usage = usage_of(done, timings=self._form.timings)
        return json_bytes(self._head | {"choices": choices, "usage": usage})

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        legacy = self._form.legacy
        message = answer.message(legacy=legacy, custom=self._form.custom)
        if self._form.text:
            said = {"text": message["content"], "logprobs": text_logprobs(answer.logprobs)}
        else:
            message |= {"refusal": None, "annotations": []}  # OpenAI's schema requires the first
            said = {"message": message, "logprobs": logprobs_of(answer.logprobs)}
        return {"index": index, **said, "finish_reason": answer.reason(legacy=legacy)}
