"""The engine's events as one `chat.completion` or `text_completion`."""

from __future__ import annotations

import time
from typing import Any

from ...protocol.events import Accepted, Done, Event
from .. import replies
from .answer import Answer, logprobs_of, text_logprobs, usage_of
from .collected import Collected
from .form import AnswerForm


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
