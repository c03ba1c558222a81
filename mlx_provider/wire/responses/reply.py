"""The engine's events as a response, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ContextTooLong, MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Finish
from .. import replies, sse
from ..openai.answer import finish_reason, usage_of
from ..openai.errors import error_body
from ..openai.stream import DONE
from .output import Output
from .tools import ChatTools

ECHOED: Mapping[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Parameters that a response repeats, with their defaults."""
OF_FUNCTIONS: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}
"""Fields of a function in a response, with their defaults."""


def echo_of(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: body[name] for name in ECHOED if body.get(name) is not None}
    tools = [
        {**OF_FUNCTIONS, **tool} if tool.get("type") == "function" else tool
        for tool in given.get("tools", [])
    ]
    return {**ECHOED, **given, "tools": tools, "store": False}


def response_usage(done: Done) -> dict[str, Any]:
    usage = usage_of(done)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    details = {"cached_tokens": cached, "cache_write_tokens": done.usage.stored_tokens}
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": details,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }


def _head(name: str, model: str, echo: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **echo,
    }


class _Response:
    def __init__(self, accepted: Accepted, tools: ChatTools, echo: Mapping[str, Any]) -> None:
        self.output = Output(accepted.id, tools)
        self.fields = _head(accepted.id, accepted.model, echo)
        self.fields["output"] = self.output.items
        for name in ("temperature", "top_p"):
            if self.fields[name] is None:
                self.fields[name] = getattr(accepted, name)

    def take(self, event: Event) -> Iterator[dict[str, Any]]:
        if isinstance(event, Accepted):
            yield self.whole("created")
            yield self.whole("in_progress")
        elif isinstance(event, Delta):
            yield from self.output.add(event)
        elif isinstance(event, Finish):
            cut = finish_reason(event, legacy=False) == "length"
            self.fields["status"] = "incomplete" if cut else "completed"
            if cut:
                self.fields["incomplete_details"] = {"reason": "max_output_tokens"}
            else:
                self.fields["completed_at"] = int(time.time())
            yield from self.output.end(self.fields["status"])
        elif isinstance(event, Done):
            self.fields["usage"] = response_usage(event)
            yield self.whole(self.fields["status"])

    def whole(self, what: str) -> dict[str, Any]:
        return {"type": f"response.{what}", "response": self.fields}


class Whole(replies.Whole):
    def __init__(self, accepted: Accepted, tools: ChatTools, echo: Mapping[str, Any]) -> None:
        self._response = _Response(accepted, tools, echo)

    def _take(self, event: Event) -> None:
        for _ in self._response.take(event):
            pass

    def _body(self, done: Done) -> dict[str, Any]:
        return self._response.fields


class Stream(replies.Streamed):
    def __init__(self, accepted: Accepted, tools: ChatTools, echo: Mapping[str, Any]) -> None:
        self._response = _Response(accepted, tools, echo)
        self._numbered = _Numbered()

    def _frames(self, event: Event) -> Iterator[bytes]:
        yield from map(self._numbered, self._response.take(event))
        if isinstance(event, Done):
            yield DONE

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        # A failed response has no place for our own code and the parameter.
        told = {**error_body(error)["error"], "type": "error"}
        yield from map(self._numbered, (told, _failed(self._response.fields, error)))
        yield DONE


def failed_stream(name: str, model: str, error: MLXProviderError, echo: Mapping[str, Any]) -> bytes:
    """The stream of a request that was not accepted."""
    fields, numbered = _head(name, model, echo), _Numbered()
    created = {"type": "response.created", "response": fields}
    return b"".join(map(numbered, (created, _failed(fields, error)))) + DONE


def _failed(fields: dict[str, Any], error: MLXProviderError) -> dict[str, Any]:
    shown = {"code": _code(error), "message": error_body(error)["error"]["message"]}
    return {"type": "response.failed", "response": {**fields, "status": "failed", "error": shown}}


def _code(error: MLXProviderError) -> str:
    """One of OpenAI's words (openai 2.54, `ResponseError`), or the one by which Codex knows that a
    conversation is too long."""
    if isinstance(error, ContextTooLong):
        return error.code
    if error.status >= 500 or error.status == 408:
        return "server_error"
    return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"


class _Numbered:
    def __init__(self) -> None:
        self._number = 0

    def __call__(self, event: dict[str, Any]) -> bytes:
        out = sse.named({**event, "sequence_number": self._number})
        self._number += 1
        return out
