"""The engine's events as one message, or as the stream of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Finish
from .. import replies, sse
from ..openai.answer import finish_reason, usage_of
from .blocks import Blocks, Content
from .errors import error_body

PING = sse.named({"type": "ping"})


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
    reason = finish_reason(finish, legacy=False)
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


class Stream(replies.Streamed):
    heartbeat = PING

    def __init__(self, accepted: Accepted, wanted: int | None, shown: Shown = Shown()) -> None:
        self._message = _Message(accepted, wanted, shown)

    def _frames(self, event: Event) -> Iterator[bytes]:
        parts = self._message.feed(event)
        return map(sse.named, [self._message.start()] if isinstance(event, Accepted) else parts)

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        yield sse.named(error_body(error))


class Whole(replies.Whole):
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
