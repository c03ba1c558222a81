"""The engine's events as the items of a response, whole or streamed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import ContextTooLong, MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Finish, ToolCallDelta
from .. import api
from ..api import event_frame
from ..openai.answer import DONE, error_body, finish_reason, logprobs_of, usage_of
from ..openai.tools import unwrap_text
from .conversation import Called, ChatTools

Fields = dict[str, Any]
KINDS = {"part": "content_", "text": "output_"}
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


class _Text:
    """A thought, or a message. Each method yields the events of a stream, without their place."""

    def __init__(self, item_id: str, *, thought: bool) -> None:
        self.thought = thought
        self._texts: list[str] = []
        self._logprobs: list[Fields] = []
        head = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress"}
        if thought:
            head = {"id": item_id, "type": "reasoning"}
        self._list = "summary" if thought else "content"
        self.fields: Fields = {**head, self._list: []}

    def begin(self) -> Iterator[Fields]:
        yield self._event("part.added", part=self._part(""))

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._texts.append(text)
        self._logprobs += logprobs
        yield self._event("text.delta", delta=text, **self._more(logprobs))

    def end(self, status: str) -> Iterator[Fields]:
        part = self._part("".join(self._texts))
        self.fields |= {self._list: [part], "status": status}
        yield self._event("text.done", text=part["text"], **self._more(self._logprobs))
        yield self._event("part.done", part=part)

    def _event(self, what: str, **more: Any) -> Fields:
        kind = "reasoning_summary_" if self.thought else KINDS[what.partition(".")[0]]
        return {"type": f"response.{kind}{what}", f"{self._list}_index": 0, **more}

    def _part(self, text: str) -> Fields:
        if self.thought:
            return {"type": "summary_text", "text": text}
        more = self._more(list(self._logprobs))
        return {"type": "output_text", "text": text, "annotations": [], **more}

    def _more(self, logprobs: list[Fields]) -> Fields:
        return {} if self.thought else {"logprobs": logprobs}


class _Call:
    """A call of a function, or of a custom tool, whose text is sent when it is complete."""

    thought = None

    def __init__(self, item_id: str, piece: ToolCallDelta, called: Called) -> None:
        self.index = piece.index
        self._custom = called.custom
        self._key = "input" if called.custom else "arguments"
        self._pieces: list[str] = []
        self.fields: Fields = {
            "id": item_id,
            "type": "custom_tool_call" if called.custom else "function_call",
            "call_id": piece.id or item_id,
            "name": called.name,
            self._key: "",
            "status": "in_progress",
        }
        if called.namespace is not None:
            self.fields["namespace"] = called.namespace

    def begin(self) -> Iterator[Fields]:
        return iter(())

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._pieces.append(text)
        if not self._custom:
            yield self._event("delta", delta=text)

    def end(self, status: str) -> Iterator[Fields]:
        text = "".join(self._pieces)
        if self._custom:
            text = unwrap_text(text)
            yield self._event("delta", delta=text)
        self.fields |= {self._key: text, "status": status}
        name = {} if self._custom else {"name": self.fields["name"]}
        yield self._event("done", **{self._key: text}, **name)

    def _event(self, what: str, **more: Any) -> Fields:
        kind = "custom_tool_call_input" if self._custom else "function_call_arguments"
        return {"type": f"response.{kind}.{what}", **more}


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
        self._id = accepted.id
        self._tools = tools
        self._items: list[Fields] = []
        self._open: _Text | _Call | None = None
        self.fields = _head(accepted.id, accepted.model, echo) | {"output": self._items}
        for name in ("temperature", "top_p"):
            if self.fields[name] is None:
                self.fields[name] = getattr(accepted, name)

    def _write(self, event: Event) -> Iterator[Fields]:
        """The events of a stream. Raises the error of a cancelled request."""
        if isinstance(event, Accepted):
            yield self._event("created")
            yield self._event("in_progress")
        elif isinstance(event, Delta):
            yield from self._add(event)
        elif isinstance(event, Finish):
            cut = finish_reason(event) == "length"
            self.fields["status"] = "incomplete" if cut else "completed"
            if cut:
                self.fields["incomplete_details"] = {"reason": "max_output_tokens"}
            else:
                self.fields["completed_at"] = int(time.time())
            yield from self._end(self.fields["status"])
        elif isinstance(event, Done):
            self.fields["usage"] = response_usage(event)
            yield self._event(self.fields["status"])

    def _event(self, what: str) -> Fields:
        return {"type": f"response.{what}", "response": self.fields}

    def _add(self, delta: Delta) -> Iterator[Fields]:
        for thought, text in ((True, delta.reasoning), (False, delta.content)):
            if text:
                if self._open is None or self._open.thought is not thought:
                    item_id = self._next_id("rs" if thought else "msg")
                    yield from self._begin(_Text(item_id, thought=thought))
                logprobs = None if thought else logprobs_of(delta.logprobs)
                yield from self._grow(text, logprobs)
        for piece in delta.tool_calls:
            if not (isinstance(self._open, _Call) and self._open.index == piece.index):
                name = piece.name or ""
                called = self._tools.called.get(name, Called(name))
                item_id = self._next_id("ctc" if called.custom else "fc")
                yield from self._begin(_Call(item_id, piece, called))
            if piece.arguments:
                yield from self._grow(piece.arguments)

    def _begin(self, item: _Text | _Call) -> Iterator[Fields]:
        yield from self._end("completed")
        self._open = item
        self._items.append(item.fields)
        yield self._item("added")
        yield from map(self._with_place, item.begin())

    def _grow(self, text: str, logprobs: Fields | None = None) -> Iterator[Fields]:
        assert self._open is not None  # noqa: S101  (a caller's mistake, not an input's)
        tokens = logprobs["content"] if logprobs else []
        yield from map(self._with_place, self._open.add(text, tokens))

    def _end(self, status: str) -> Iterator[Fields]:
        if self._open is not None:
            yield from map(self._with_place, self._open.end(status))
            yield self._item("done")
            self._open = None

    def _item(self, what: str) -> Fields:
        """With a copy, because the item still changes."""
        at = len(self._items) - 1
        item = dict(self._items[at])
        return {"type": f"response.output_item.{what}", "output_index": at, "item": item}

    def _with_place(self, event: Fields) -> Fields:
        at = len(self._items) - 1
        return {**event, "output_index": at, "item_id": self._items[at]["id"]}

    def _next_id(self, kind: str) -> str:
        return f"{kind}_{self._id}_{len(self._items)}"


class Whole(_Response, api.Whole):
    def _body(self, events: Sequence[Event], done: Done) -> Fields:
        for event in events:
            deque(self._write(event), maxlen=0)
        return self.fields


class Stream(_Response, api.Stream):
    _sent = 0

    def _frames(self, event: Event) -> Iterator[bytes]:
        yield from map(self._frame, self._write(event))
        if isinstance(event, Done):
            yield DONE

    def _frame(self, event: Fields) -> bytes:
        self._sent += 1
        return event_frame({**event, "sequence_number": self._sent - 1})

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        # A failed response has no place for our own code and the parameter.
        reported = {**error_body(error)["error"], "type": "error"}
        yield from map(self._frame, (reported, _failure_of(self.fields, error)))
        yield DONE


def failed_stream(name: str, model: str, error: MLXProviderError, echo: Mapping[str, Any]) -> bytes:
    """The stream of a request that was not accepted."""
    fields = _head(name, model, echo)
    events = ({"type": "response.created", "response": fields}, _failure_of(fields, error))
    frames = (event_frame({**e, "sequence_number": at}) for at, e in enumerate(events))
    return b"".join(frames) + DONE


def _failure_of(fields: Fields, error: MLXProviderError) -> Fields:
    reported = {"code": _code(error), "message": error_body(error)["error"]["message"]}
    response = {**fields, "status": "failed", "error": reported}
    return {"type": "response.failed", "response": response}


def _code(error: MLXProviderError) -> str:
    """One of OpenAI's words (openai 2.54, `ResponseError`), or the one by which Codex knows that a
    conversation is too long."""
    if isinstance(error, ContextTooLong):
        return error.code
    if error.status >= 500 or error.status == 408:
        return "server_error"
    return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
