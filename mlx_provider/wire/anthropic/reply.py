"""The engine's events as one message, or as the stream of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import EngineUnavailable, MLXProviderError
from ...protocol.events import Accepted, Delta, Done, Event, Failed, Finish
from .. import sse
from ..asked import JSON, json_bytes
from ..openai.answer import usage_of
from .blocks import Blocks, Content
from .errors import error_body

PING = sse.named({"type": "ping"})


@dataclass(frozen=True)
class Shown:
    """What of a reply its client sees."""

    thoughts: bool = True
    """Whether their text is shown."""
    stored: bool = False
    """Whether tokens that are stored in the prefix cache are counted apart from other input."""


class _Message:
    """The events of a reply as those of a message's stream."""

    def __init__(self, accepted: Accepted, wanted: int | None, shown: Shown) -> None:
        """`wanted`: `max_tokens` of the request, of which the context may leave less."""
        self._blocks = Blocks(thoughts=shown.thoughts)
        self._shown = shown
        self._accepted = accepted
        self._clipped = wanted is not None and accepted.max_tokens < wanted
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
        """Raises the error of a request that failed or was cancelled."""
        if isinstance(event, Delta):
            yield from self._blocks.feed(event)
        elif isinstance(event, Finish):
            self._end = {"stop_reason": self._reason(event), "stop_sequence": event.stop}
            yield from self._blocks.end()
        elif isinstance(event, Done):
            end = {**self._end, "stop_details": None, "container": None}
            yield {"type": "message_delta", "delta": end, "usage": self._usage(event)}
            yield {"type": "message_stop"}
        elif isinstance(event, Failed):
            raise event.error.exception()

    def _usage(self, done: Done) -> dict[str, Any]:
        """The last token of a prompt is always computed, so that it is in neither count of the
        cache."""
        usage = usage_of(done)
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        new = max(0, min(done.usage.stored_tokens, prompt - cached - 1))
        stored = new if self._shown.stored else 0
        counts = _counts(prompt, cached, stored, usage["completion_tokens"])
        thought = usage["completion_tokens_details"]["reasoning_tokens"]
        details = {"thinking_tokens": thought}
        return counts | {"output_tokens_details": details, "server_tool_use": None}

    def _reason(self, finish: Finish) -> str:
        if finish.reason == "cancelled":
            raise EngineUnavailable("the engine cancelled the request")
        if finish.reason == "length":
            return "model_context_window_exceeded" if self._clipped else "max_tokens"
        if finish.reason == "tool_calls":
            return "tool_use"
        return "stop_sequence" if finish.stop else "end_turn"


NOTHING_ELSE = dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use", "service_tier"))
"""Fields of usage that a message must have."""


def _counts(prompt: int, cached: int, stored: int, completion: int) -> dict[str, Any]:
    """Anthropic counts the tokens that were read from the cache, and stored in it, apart."""
    return {
        "input_tokens": prompt - cached - stored,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": stored,
        "output_tokens": completion,
        "output_tokens_details": None,
    }


class Stream:
    """See `asked.Reply`."""

    media_type = sse.MEDIA_TYPE
    heartbeat = PING
    streamed = True

    def __init__(self, accepted: Accepted, wanted: int | None, shown: Shown = Shown()) -> None:
        self._message = _Message(accepted, wanted, shown)
        self._ended = False

    def feed(self, events: Sequence[Event]) -> bytes:
        out: list[bytes] = []
        try:
            for event in events:
                if isinstance(event, Accepted):
                    out.append(sse.named(self._message.start()))
                elif not self._ended:
                    out.extend(map(sse.named, self._message.feed(event)))
        except MLXProviderError as error:
            self._ended = True
            out.append(sse.named(error_body(error)))
        return b"".join(out)


class Whole:
    """See `asked.Reply`."""

    media_type = JSON
    heartbeat = b""
    streamed = False

    def __init__(self, accepted: Accepted, wanted: int | None, shown: Shown = Shown()) -> None:
        self._message = _Message(accepted, wanted, shown)
        self._content = Content()

    def feed(self, events: Sequence[Event]) -> bytes:
        for event in events:
            for part in self._message.feed(event):
                if part["type"] == "message_delta":
                    return self._body(part)
                self._content.add(part)
        return b""

    def _body(self, end: dict[str, Any]) -> bytes:
        message = self._message.start()["message"]
        usage = message["usage"] | end["usage"]
        more = {"content": self._content.whole(), "usage": usage}
        return json_bytes(message | end["delta"] | more)
