"""The routes of Anthropic's API, and the engine's events as content blocks, streamed or whole."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from ...chat.messages.parts import arguments_mapping
from ...errors import MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Finish
from .. import api
from ..api import ParsedRequest, Read, check_kind, event_frame
from ..openai import answer
from ..openai.answer import finish_reason, usage_of
from ..openai.request import Parameters
from .request import cache_marks, message_request

TYPES = {**answer.TYPES, 404: "not_found_error", 413: "request_too_large"}  # of errors, by status
Part = dict[str, Any]  # an event of the stream, or an object in one
PING = event_frame({"type": "ping"})
NOTHING_ELSE = dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use", "service_tier"))
"""Members of the usage that are always null here."""
DISPLAYS = ("summarized", "omitted")
"""Values of `thinking.display`. For `summarized`, thoughts are sent whole."""


def _read_message(body: dict[str, Any], sender: Mapping[str, Any]) -> ParsedRequest:
    params = Parameters(body)
    kind = Stream if params.flag("stream") else WholeResponse
    display = params.mapping("thinking").get("display")
    if display is not None:
        check_kind(display, "thinking.display", DISPLAYS)
    request, names = message_request(body, sender)
    shows, stored = display != "omitted", bool(cache_marks(body))
    reply = partial(kind, wanted=body["max_tokens"], thoughts=shows, stored=stored)
    return ParsedRequest([request], reply, names)


def _read_count(body: dict[str, Any], sender: Mapping[str, Any]) -> ParsedRequest:
    request, names = message_request(body, sender, counted=True)
    return ParsedRequest([request], partial(WholeResponse, wanted=None), names)  # reply is unused


class _Message:
    """Turns the engine's events into those of Anthropic's stream. One block is open at a time."""

    def __init__(
        self, accepted: Accepted, wanted: int | None, *, thoughts: bool = True, stored: bool = False
    ) -> None:
        """`wanted`: `max_tokens` of the request, of which the context may leave less; -1: all that
        it leaves. `thoughts`: send their text, not only a block for each. `stored`: count tokens
        that were stored in the prefix cache separately from other input."""
        self._accepted = accepted
        self._thoughts, self._stored = thoughts, stored
        self._clipped = wanted is not None and not 0 < wanted <= accepted.max_tokens
        self._ending: Part = {}
        self._open: object = None  # the open block: "thinking", "text" or the index of a call
        self._index = -1
        self._signature = sha256()

    def _write(self, event: Event) -> Iterator[Part]:
        if isinstance(event, Accepted):
            yield {"type": "message_start", "message": self._head()}
        elif isinstance(event, Delta):
            yield from self._blocks(event)
        elif isinstance(event, Finish):
            self._ending = ending(event, clipped=self._clipped)
            yield from self._end()
        elif isinstance(event, Done):
            end = {**self._ending, "stop_details": None, "container": None}
            yield {"type": "message_delta", "delta": end, "usage": self._usage(event)}
            yield {"type": "message_stop"}

    def _head(self) -> Part:
        accepted = self._accepted
        usage = _counts(accepted.prompt_tokens, 0, 0, 0) | NOTHING_ELSE
        return {
            "id": f"msg_{accepted.id}", "type": "message", "role": "assistant",
            "model": accepted.model, "content": [], "stop_reason": None, "stop_sequence": None,
            "stop_details": None, "container": None, "usage": usage,
        }  # fmt: skip

    def _blocks(self, delta: Delta) -> Iterator[Part]:
        if delta.reasoning:
            thought = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._begin("thinking", thought)
            self._signature.update(delta.reasoning.encode())
            if self._thoughts:
                yield self._delta("thinking", thinking=delta.reasoning)
        if delta.content:
            yield from self._begin("text", {"type": "text", "text": "", "citations": None})
            yield self._delta("text", text=delta.content)
        for piece in delta.tool_calls:
            call = {"type": "tool_use", "id": piece.id, "name": piece.name}
            block = {**call, "input": {}, "caller": {"type": "direct"}}
            yield from self._begin(piece.index, block)
            if piece.arguments:
                yield self._delta("input_json", partial_json=piece.arguments)

    def _begin(self, kind: object, block: Part) -> Iterator[Part]:
        if kind != self._open:
            yield from self._end()
            self._open, self._signature = kind, sha256()
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self) -> Iterator[Part]:
        if self._open is None:
            return
        if self._open == "thinking":  # clients drop thoughts without a signature
            yield self._delta("signature", signature=b64encode(self._signature.digest()).decode())
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _delta(self, kind: str, **text: str) -> Part:
        delta = {"type": f"{kind}_delta", **text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _usage(self, done: Done) -> Part:
        """The last token of a prompt is always computed, so neither count of the cache has it."""
        usage = usage_of(done)
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        new = max(0, min(done.usage.stored_tokens, prompt - cached - 1))
        stored = new if self._stored else 0
        counts = _counts(prompt, cached, stored, usage["completion_tokens"])
        details = {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]}
        return counts | {"output_tokens_details": details, "server_tool_use": None}


class Stream(_Message, api.Stream):
    heartbeat = PING

    def _frames(self, event: Event) -> Iterator[bytes]:
        return map(event_frame, self._write(event))

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        yield event_frame(error_body(error))


class WholeResponse(_Message, api.WholeResponse):
    def _body(self, events: Sequence[Event], done: Done) -> Part:
        message, content = self._head(), list[Part]()
        for part in (part for event in events for part in self._write(event)):
            if part["type"] == "content_block_start":
                content.append(part["content_block"])
            elif part["type"] == "content_block_delta":
                for name in part["delta"].keys() - {"type"}:
                    content[-1][name] = content[-1].get(name, "") + part["delta"][name]
            elif part["type"] == "message_delta":
                message |= {**part["delta"], "usage": message["usage"] | part["usage"]}
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = arguments_mapping(block.pop("partial_json", None))
        return message | {"content": content}


def ending(finish: Finish, *, clipped: bool) -> Part:
    """How a message ended. `clipped`: the context left less room than `max_tokens`."""
    reason = finish_reason(finish)
    if reason == "length":
        reason = "model_context_window_exceeded" if clipped else "max_tokens"
    elif reason == "tool_calls":
        reason = "tool_use"
    else:
        reason = "stop_sequence" if finish.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": finish.stop}


def _counts(prompt: int, cached: int, stored: int, completion: int) -> Part:
    """Members of the usage. `input_tokens` excludes tokens read from the cache and stored in it."""
    return {
        "input_tokens": prompt - cached - stored, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": stored, "output_tokens": completion,
        "output_tokens_details": None,
    }  # fmt: skip


def error_body(error: MLXProviderError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = TYPES.get(error.status, other)
    shown = {"type": kind, "message": error.message, "details": {"error_code": error.code}}
    return {"type": "error", "error": shown, "request_id": None}


GENERATE: Mapping[str, Read] = {"/v1/messages": _read_message}
ROUTES: Mapping[str, Read] = {**GENERATE, "/v1/messages/count_tokens": _read_count}
