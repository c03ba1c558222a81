"""The routes of Anthropic's API, and the engine's events as content blocks, streamed or whole."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

from ...chat.messages.parts import arguments_mapping
from ...errors import MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Finish
from .. import api
from ..api import ParsedRequest, Read, check_kind, named
from ..openai import answer
from ..openai.answer import call_pieces, finish_reason, usage_of
from ..openai.parameters import Parameters
from .request import cache_marks, message_request

TYPES = {**answer.TYPES, 404: "not_found_error", 413: "request_too_large"}


def error_body(error: MLXProviderError) -> dict[str, Any]:
    """Clients know a prompt that is too long by Anthropic's words, which the error has already."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = TYPES.get(error.status, other)
    shown = {"type": kind, "message": error.message, "details": {"error_code": error.code}}
    return {"type": "error", "error": shown, "request_id": None}


Part = dict[str, Any]


class Blocks:
    """One block is open at a time."""

    def __init__(self, *, thoughts: bool = True) -> None:
        """`thoughts`: whether their text is sent, or only a block for each."""
        self._thoughts = thoughts
        self._kind: object = None
        """Type of the open block, or the number of its call."""
        self._index = -1
        self._signature = sha256()

    def feed(self, delta: Delta) -> Iterator[Part]:
        if delta.reasoning:
            yield from self._begin(
                "thinking", {"type": "thinking", "thinking": "", "signature": ""}
            )
            self._signature.update(delta.reasoning.encode())
            if self._thoughts:
                yield self._delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            yield from self._begin("text", {"type": "text", "text": "", "citations": None})
            yield self._delta({"type": "text_delta", "text": delta.content})
        for piece in call_pieces(delta.tool_calls):
            function = piece["function"]
            call = {"type": "tool_use", "id": piece["id"], "name": function["name"]}
            block = {**call, "input": {}, "caller": {"type": "direct"}}
            yield from self._begin(piece["index"], block)
            if function["arguments"]:
                part = {"type": "input_json_delta", "partial_json": function["arguments"]}
                yield self._delta(part)

    def end(self) -> Iterator[Part]:
        if self._kind is None:
            return
        if self._kind == "thinking":  # clients drop thoughts without a signature
            yield self._delta({"type": "signature_delta", "signature": self._signed()})
        yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _begin(self, kind: object, block: Part) -> Iterator[Part]:
        if kind != self._kind:
            yield from self.end()
            self._kind, self._signature = kind, sha256()
            self._index += 1
            yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, part: Part) -> Part:
        return {"type": "content_block_delta", "index": self._index, "delta": part}

    def _signed(self) -> str:
        return b64encode(self._signature.digest()).decode()


class Content:
    def __init__(self) -> None:
        self._blocks: list[Part] = []
        self._texts: list[dict[str, list[str]]] = []

    def add(self, event: Part) -> None:
        if event["type"] == "content_block_start":
            self._blocks.append(event["content_block"])
            self._texts.append({})
        elif event["type"] == "content_block_delta":
            ((name, text),) = ((k, v) for k, v in event["delta"].items() if k != "type")
            self._texts[-1].setdefault(name, []).append(text)

    def whole(self) -> list[Part]:
        return [
            _whole(block, {name: "".join(texts) for name, texts in pieces.items()})
            for block, pieces in zip(self._blocks, self._texts, strict=True)
        ]


def _whole(block: Part, texts: dict[str, str]) -> Part:
    if block["type"] == "tool_use":
        return block | {"input": arguments_mapping(texts.get("partial_json"))}
    return block | texts


PING = named({"type": "ping"})


@dataclass(frozen=True)
class Shown:
    thoughts: bool = True
    stored: bool = False
    """Count tokens stored in the prefix cache separately from other input."""


class _Message:
    def __init__(self, accepted: Accepted, wanted: int | None, shown: Shown) -> None:
        """`wanted`: `max_tokens` of the request, of which the context may leave less; -1: all."""
        self._blocks = Blocks(thoughts=shown.thoughts)
        self._shown = shown
        self._accepted = accepted
        self._clipped = wanted is not None and not 0 < wanted <= accepted.max_tokens
        self._end: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        return {
            "type": "message_start",
            "message": {
                "id": f"msg_{self._accepted.id}",
                "type": "message",
                "role": "assistant",
                "model": self._accepted.model,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "stop_details": None,
                "container": None,
                "usage": _counts(self._accepted.prompt_tokens, 0, 0, 0) | NOTHING_ELSE,
            },
        }

    def feed(self, event: Event) -> Iterator[dict[str, Any]]:
        """Raises the error of a cancelled request."""
        if isinstance(event, Delta):
            yield from self._blocks.feed(event)
        elif isinstance(event, Finish):
            self._end = ending(event, clipped=self._clipped)
            yield from self._blocks.end()
        elif isinstance(event, Done):
            end = {**self._end, "stop_details": None, "container": None}
            yield {"type": "message_delta", "delta": end, "usage": self._usage(event)}
            yield {"type": "message_stop"}

    def _usage(self, done: Done) -> dict[str, Any]:
        """The last token of a prompt is always computed, so neither count of the cache has it."""
        usage = usage_of(done)
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        new = max(0, min(done.usage.stored_tokens, prompt - cached - 1))
        stored = new if self._shown.stored else 0
        counts = _counts(prompt, cached, stored, usage["completion_tokens"])
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        details = {"thinking_tokens": thought}
        return counts | {"output_tokens_details": details, "server_tool_use": None}


def ending(finish: Finish, *, clipped: bool) -> dict[str, Any]:
    """`clipped`: the context left less room than `max_tokens`."""
    reason = finish_reason(finish)
    if reason == "length":
        reason = "model_context_window_exceeded" if clipped else "max_tokens"
    elif reason == "tool_calls":
        reason = "tool_use"
    else:
        reason = "stop_sequence" if finish.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": finish.stop}


NOTHING_ELSE = dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use", "service_tier"))


def _counts(prompt: int, cached: int, stored: int, completion: int) -> dict[str, Any]:
    """Anthropic's input count excludes tokens read from the cache and stored in it."""
    return {
        "input_tokens": prompt - cached - stored,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": stored,
        "output_tokens": completion,
        "output_tokens_details": None,
    }


class Stream(api.Stream):
    heartbeat = PING

    def __init__(self, accepted: Accepted, wanted: int | None, shown: Shown = Shown()) -> None:
        self._message = _Message(accepted, wanted, shown)

    def _frames(self, event: Event) -> Iterator[bytes]:
        parts = self._message.feed(event)
        return map(named, [self._message.start()] if isinstance(event, Accepted) else parts)

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        yield named(error_body(error))


class Whole(api.Whole):
    def __init__(self, accepted: Accepted, wanted: int | None, shown: Shown = Shown()) -> None:
        self._message = _Message(accepted, wanted, shown)
        self._content = Content()

    def _take(self, event: Event) -> None:
        if not isinstance(event, Done):
            for part in self._message.feed(event):
                self._content.add(part)

    def _body(self, done: Done) -> dict[str, Any]:
        message, end = self._message.start()["message"], next(self._message.feed(done))
        usage = message["usage"] | end["usage"]
        more = {"content": self._content.whole(), "usage": usage}
        return {**message, **end["delta"], **more}


DISPLAYS = ("summarized", "omitted")
"""Of thoughts: a local model's are sent whole in place of a summary."""


def _messages(body: dict[str, Any], sender: Mapping[str, Any]) -> ParsedRequest:
    params = Parameters(body)
    reply, thinking = Stream if params.flag("stream") else Whole, params.mapping("thinking")
    if thinking.get("display") is not None:
        check_kind(thinking["display"], "thinking.display", DISPLAYS)
    request, names = message_request(body, sender)
    shown = Shown(thoughts=thinking.get("display") != "omitted", stored=bool(cache_marks(body)))
    return ParsedRequest(
        [request], partial(reply, wanted=body["max_tokens"], shown=shown), names=names
    )


def _count(body: dict[str, Any], sender: Mapping[str, Any]) -> ParsedRequest:
    request, names = message_request(body, sender, counted=True)
    return ParsedRequest([request], partial(Whole, wanted=None), names)


GENERATE: Mapping[str, Read] = {"/v1/messages": _messages}
ROUTES: Mapping[str, Read] = {**GENERATE, "/v1/messages/count_tokens": _count}
