"""The routes of the Responses API: its parameters as those of chat, and the engine's events as the
items of a response, whole or streamed."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...errors import ContextTooLong, MLXProviderError, wrong_part
from ...protocol.events import Accepted, Delta, Done, Event, Finish, ToolCallDelta
from ...protocol.requests import GenerateRequest
from .. import api
from ..api import ClientNames, ParsedRequest, Read, event_frame
from ..openai.answer import DONE, error_body, finish_reason, logprobs_of, usage_of
from ..openai.request import SCHEMA, Parameters, WithoutEffect, generate_requests, parameter_names
from .conversation import ABSENT, ChatTools, ToolName, check_parameters, messages_of, unwrap_text

Fields = dict[str, Any]  # a JSON object of the reply
THOUGHT, TEXT = "reasoning_summary_text", "output_text"  # see `_Item.word`
CUSTOM = "custom_tool_call_input"
ECHOED: Mapping[str, Any] = {
    **dict.fromkeys(
        "instructions max_output_tokens max_tool_calls previous_response_id prompt_cache_key"
        " safety_identifier temperature top_p user".split()
    ),
    "background": False,
    "frequency_penalty": 0.0,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Parameters that a response repeats, with their defaults."""
OF_FUNCTIONS: Mapping[str, Any] = {"description": None, "parameters": None, "strict": None}
"""The same for the members of a function."""
REFUSED = {
    **ABSENT,
    "previous_response_id": "answers are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
}
"""Parameters that are refused, and the remedy."""
OWN = ("model", "input", "instructions", "text", "reasoning", "include", "tools", "tool_choice")
"""Parameters that are converted here, not passed on."""
NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
}
"""Parameters of chat, and those of the Responses API in their place."""
WITHOUT_EFFECT: Mapping[str, WithoutEffect] = {  # values that give no warning; `None`: all values
    **dict.fromkeys(("client_metadata", "prompt_cache_options", *REFUSED)),
    **dict.fromkeys("access_programs background_options image max_tool_calls".split(), ()),
    "moderation": (),
    "truncation": ("disabled",),
}
LOGPROBS = "message.output_text.logprobs"  # in the list `include`


def _read_response(body: dict[str, Any], sender: Mapping[str, Any]) -> ParsedRequest:
    streamed = Parameters(body).flag("stream")
    request, names, tools = response_request(body, sender)
    reply = partial(Stream if streamed else WholeResponse, tools=tools, echo=echo_of(body))
    # Codex shortens a conversation only if a stream says that it is too long
    return ParsedRequest([request], reply, names, in_stream=(ContextTooLong,))


def response_request(
    body: Mapping[str, Any], sender: Mapping[str, Any]
) -> tuple[GenerateRequest, ClientNames, ChatTools]:
    """The request, the client's names of its parts, and its tools. Raises `BadRequest`."""
    check_parameters(body, REFUSED)
    instructions = Parameters(body).take_typed("instructions", str)
    tools = ChatTools(body.get("tools"))
    values = {name: value for name, value in body.items() if name not in OWN}
    own = Parameters(values)
    for name, here in NAMES.items():
        own.choice(name, (), f"the Responses API has {here} in its place")
    values |= _text(body) | _logprobs(body)
    values |= {"reasoning_effort": body.get("reasoning"), "tools": tools.tools}
    values["tool_choice"] = tools.choice(body.get("tool_choice"))
    values["max_tokens"] = values.pop("max_output_tokens", None)
    params = Parameters(values, WITHOUT_EFFECT, tools.ignored)
    params.choice("n", (1,), "send the request again for another answer")
    turns = messages_of(body.get("input"), instructions)
    if not turns.messages:
        raise wrong_part("input", "must hold at least one item")
    fields = {**sender, "tool_grammars": tools.grammars}
    names = ClientNames(_names(body) | tools.places | turns.places).before(parameter_names(values))
    with names.naming():
        (request,) = generate_requests(params, fields, turns.messages)
    return request, names, tools


def _names(body: Mapping[str, Any]) -> dict[str, str]:
    names = {**NAMES, "response_format.json_schema": "text.format", SCHEMA: "text.format.schema"}
    if not isinstance(body.get("reasoning"), Mapping):
        names["reasoning_effort"] = "reasoning"
    return names


def _text(body: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter `text` as parameters of chat."""
    text = Parameters(body).mapping("text")
    form = text.get("format")
    wanted = {"verbosity": text.get("verbosity")}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        wanted["response_format"] = {"type": "json_schema", "json_schema": form}
    elif form is not None:
        wanted["response_format"] = form
    return wanted


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    include = Parameters(body).take_typed("include", list) or []
    return {"logprobs": True} if LOGPROBS in include or body.get("top_logprobs") else {}


def echo_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a response that repeat the request."""
    given = {name: body[name] for name in ECHOED if body.get(name) is not None}
    tools = [
        {**OF_FUNCTIONS, **tool} if tool.get("type") == "function" else tool
        for tool in given.get("tools", [])
    ]
    return {**ECHOED, **given, "tools": tools, "store": False}


@dataclass
class _Item:
    """A thought, a message, or a call of the response. Methods yield events of a stream."""

    at: int  # index in the output
    fields: Fields  # the item itself
    key: str  # the field with its text, or with the list of its one part
    word: str  # middle of the event types for its text, as in `response.<word>.delta`
    part: str = ""  # the same for its part, which calls do not have
    call: int | None = None  # index of the call in the engine's events
    _texts: list[str] = field(default_factory=list)
    _logprobs: list[Fields] = field(default_factory=list)

    def begin(self) -> Iterator[Fields]:
        yield self._whole("added")
        if self.part:
            yield self._event(self.part, "added", part=self._part(""))

    def add(self, text: str, logprobs: list[Fields]) -> Iterator[Fields]:
        self._texts.append(text)
        self._logprobs += logprobs
        if self.word != CUSTOM:
            yield self._event(self.word, "delta", delta=text, **self._more(logprobs))

    def end(self, status: str) -> Iterator[Fields]:
        text = "".join(self._texts)
        if self.word == CUSTOM:
            text = unwrap_text(text)
            yield self._event(CUSTOM, "delta", delta=text)
        part = self._part(text)
        self.fields |= {self.key: [part] if self.part else text, "status": status}
        if self.part:
            yield self._event(self.word, "done", text=text, **self._more(self._logprobs))
            yield self._event(self.part, "done", part=part)
        else:
            name = {} if self.word == CUSTOM else {"name": self.fields["name"]}
            yield self._event(self.word, "done", **{self.key: text}, **name)
        yield self._whole("done")

    def _whole(self, what: str) -> Fields:
        """An event with a copy of the item, because the item still changes."""
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": self.at, "item": {**self.fields}}

    def _event(self, word: str, what: str, **more: Any) -> Fields:
        index = {f"{self.key}_index": 0} if self.part else {}
        place = {"output_index": self.at, "item_id": self.fields["id"]}
        return {"type": f"response.{word}.{what}", **index, **more, **place}

    def _part(self, text: str) -> Fields:
        if self.word == THOUGHT:
            return {"type": "summary_text", "text": text}
        more = self._more(list(self._logprobs))
        return {"type": "output_text", "text": text, "annotations": [], **more}

    def _more(self, logprobs: list[Fields]) -> Fields:
        """Only the text of a message has log-probabilities."""
        return {"logprobs": logprobs} if self.word == TEXT else {}


def _thought(at: int, item_id: str) -> _Item:
    fields = {"id": item_id, "type": "reasoning", "summary": []}
    return _Item(at, fields, "summary", THOUGHT, "reasoning_summary_part")


def _message(at: int, item_id: str) -> _Item:
    head = {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress"}
    return _Item(at, {**head, "content": []}, "content", TEXT, "content_part")


def _call(at: int, item_id: str, piece: ToolCallDelta, tool: ToolName) -> _Item:
    key = "input" if tool.custom else "arguments"
    kind = "custom_tool_call" if tool.custom else "function_call"
    fields: Fields = {"id": item_id, "type": kind, "call_id": piece.id or item_id}
    fields |= {"name": tool.name, key: "", "status": "in_progress"}
    if tool.namespace is not None:
        fields["namespace"] = tool.namespace
    word = CUSTOM if tool.custom else "function_call_arguments"
    return _Item(at, fields, key, word, call=piece.index)


class _Response:
    """Turns the engine's events into those of this API, and collects the response in `fields`."""

    def __init__(self, accepted: Accepted, tools: ChatTools, echo: Mapping[str, Any]) -> None:
        self._id = accepted.id
        self._tools = tools
        self._items: list[Fields] = []
        self._open: _Item | None = None
        self._early_logprobs: list[Fields] = []
        """Of tokens that have not become text yet. A message that follows gets them."""
        self.fields = _head(accepted.id, accepted.model, echo) | {"output": self._items}
        for name in ("temperature", "top_p"):
            if self.fields[name] is None:
                self.fields[name] = getattr(accepted, name)

    def _write(self, event: Event) -> Iterator[Fields]:
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
        found = logprobs_of(delta.logprobs)
        logprobs = [*self._early_logprobs, *(found["content"] if found else [])]
        silent = not (delta.reasoning or delta.content or delta.tool_calls)  # tokens without text
        if silent and (self._open is None or self._open.word != TEXT):
            self._early_logprobs = logprobs
            return
        self._early_logprobs = []
        texts = (THOUGHT, "rs", _thought, delta.reasoning), (TEXT, "msg", _message, delta.content)
        for word, prefix, make, text in texts:
            if text or (word == TEXT and silent and logprobs):  # silent: the message is open
                item = self._open
                if item is None or item.word != word:
                    if item is not None and item.word == THOUGHT:
                        logprobs = _tokens_of(text, logprobs)
                    item = make(*self._next(prefix))
                    yield from self._begin(item)
                yield from item.add(text, [] if word == THOUGHT else logprobs)
        for piece in delta.tool_calls:
            item = self._open
            if item is None or item.call != piece.index:
                name = piece.name or ""
                tool = self._tools.names.get(name, ToolName(name))
                item = _call(*self._next("ctc" if tool.custom else "fc"), piece, tool)
                yield from self._begin(item)
            if piece.arguments:
                yield from item.add(piece.arguments, [])

    def _begin(self, item: _Item) -> Iterator[Fields]:
        yield from self._end("completed")
        self._open = item
        self._items.append(item.fields)
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Fields]:
        if self._open is not None:
            yield from self._open.end(status)
            self._open = None

    def _next(self, prefix: str) -> tuple[int, str]:
        """Index and id of the next item."""
        at = len(self._items)
        return at, f"{prefix}_{self._id}_{at}"


def _tokens_of(text: str, logprobs: list[Fields]) -> list[Fields]:
    """The log-probabilities without those of tokens before `text`, such as a thought's end."""
    while text.encode() in b"".join(bytes(token["bytes"]) for token in logprobs[1:]):
        logprobs = logprobs[1:]
    return logprobs


class WholeResponse(_Response, api.WholeResponse):
    def _body(self, events: Sequence[Event], done: Done) -> Fields:
        for event in events:
            deque(self._write(event), maxlen=0)  # only its effect on `fields` counts
        return self.fields


class Stream(_Response, api.Stream):
    _sent = 0  # number of events so far

    def _frames(self, event: Event) -> Iterator[bytes]:
        yield from map(self._frame, self._write(event))
        if isinstance(event, Done):
            yield DONE

    def _frame(self, event: Fields) -> bytes:
        self._sent += 1
        return event_frame({**event, "sequence_number": self._sent - 1})

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        # Only the `error` event has a place for our own code and the parameter. But a stream must
        # begin with `created`: if nothing was sent, `response.failed` alone reports the error.
        reported = {**error_body(error)["error"], "type": "error"}
        first = reported if self._sent else self._event("created")
        code = {"code": _code(error), "message": reported["message"]}
        response = {**self.fields, "status": "failed", "error": code}
        failed = {"type": "response.failed", "response": response}
        yield from map(self._frame, (first, failed))
        yield DONE


def response_usage(done: Done) -> dict[str, Any]:
    """Usage in the form of this API."""
    usage = usage_of(done)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    details = {"cached_tokens": cached, "cache_write_tokens": done.usage.stored_tokens}
    thoughts = {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]}
    return {
        "input_tokens": usage["prompt_tokens"], "input_tokens_details": details,
        "output_tokens": usage["completion_tokens"], "output_tokens_details": thoughts,
        "total_tokens": usage["total_tokens"],
    }  # fmt: skip


def _head(name: str, model: str, echo: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{name}", "object": "response", "created_at": int(time.time()),
        "completed_at": None, "model": model, "status": "in_progress", "error": None,
        "incomplete_details": None, "output": [], "usage": None, **echo,
    }  # fmt: skip


def _code(error: MLXProviderError) -> str:
    """One of OpenAI's words (openai 2.54, `ResponseError`), or the one by which Codex knows that a
    conversation is too long."""
    if isinstance(error, ContextTooLong):
        return error.code
    if error.status >= 500 or error.status == 408:
        return "server_error"
    return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"


GENERATE: Mapping[str, Read] = {"/v1/responses": _read_response}
ROUTES: Mapping[str, Read] = {**GENERATE, "/v1/responses/input_tokens": _read_response}
"""`input_tokens` counts the prompt tokens of the request that the other route would generate."""
