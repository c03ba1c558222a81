"""The engine's events as parts of OpenAI's replies: messages, log-probabilities, usage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import EngineUnavailable
from ...protocol.events import Delta, Done, Finish, TokenLogprob, ToolCallDelta
from .custom_tools import unwrapped, with_custom


@dataclass
class Answer:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            call = self.calls.setdefault(
                piece.index,
                {"id": piece.id, "type": "function", "function": {"name": None, "arguments": ""}},
            )
            call["id"] = call["id"] or piece.id
            call["function"]["name"] = call["function"]["name"] or piece.name
            call["function"]["arguments"] += piece.arguments

    def message(self, *, legacy: bool, custom: Collection[str] = ()) -> dict[str, Any]:
        """`content` is null if there are only calls. `custom`: names of tools."""
        calls = [with_custom(self.calls[index], custom) for index in sorted(self.calls)]
        content = "".join(self.content)
        fields: dict[str, Any] = {"role": "assistant"}
        fields["content"] = None if calls and not content else content
        if calls and legacy:
            fields["function_call"] = calls[0]["function"]
        elif calls:
            fields["tool_calls"] = calls
        if reasoning := "".join(self.reasoning):
            fields["reasoning_content"] = reasoning
        return fields

    def reason(self, *, legacy: bool) -> str:
        return "stop" if self.finish is None else finish_reason(self.finish, legacy=legacy)


def usage_of(done: Done, *, timings: bool = False) -> dict[str, Any]:
    """Cached tokens are fewer than prompt tokens, as LiteLLM's own tests demand. `timings`: add the
    engine's times to the details of the completion. LiteLLM's streams drop other new fields of the
    usage (1.106.2, `calculate_usage`)."""
    usage = done.usage
    times = {"timings": done.timings.model_dump()} if timings else {}
    cached = max(0, min(usage.cached_tokens, usage.prompt_tokens - 1))
    skipped = {"skipped_tokens": usage.skipped_tokens} if usage.skipped_tokens else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached, **skipped},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_tokens,
            **times,
        },
    }


def logprobs_of(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {
        "content": [
            {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]}
            for token in tokens
        ],
        "refusal": None,
    }


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "bytes": token.bytes, "logprob": token.logprob}


def text_logprobs(tokens: Sequence[TokenLogprob], begins: int = 0) -> dict[str, Any] | None:
    """In the form of text completions: lists of equal length. `None`: not requested. `begins`:
    characters of the choice before these tokens, for `text_offset`."""
    if not tokens:
        return None
    offsets = [begins]
    for token in tokens:
        offsets.append(offsets[-1] + len(token.token))
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {t.token: t.logprob for t in token.top}
            for token in tokens
        ],
        "text_offset": offsets[:-1],
    }


def finish_reason(finish: Finish, *, legacy: bool) -> str:
    """Raises `EngineUnavailable` for a request that the engine cancelled."""
    if finish.reason == "cancelled":
        raise EngineUnavailable("the engine cancelled the request")
    if legacy and finish.reason == "tool_calls":
        return "function_call"
    return finish.reason


def delta_parts(
    event: Delta, *, legacy: bool, custom: Collection[str] = ()
) -> list[dict[str, Any]]:
    """One delta per kind of output, because accumulators of clients take one kind at a time.
    `custom`: names of custom tools, whose calls must be whole (`custom_tools.WholeCalls`)."""
    parts: list[dict[str, Any]] = []
    if event.reasoning:
        parts.append({"reasoning_content": event.reasoning})
    if event.content:
        parts.append({"content": event.content})
    for piece in call_pieces(event.tool_calls, custom):
        call = {"function_call": piece["function"]} if legacy else {"tool_calls": [piece]}
        parts.append(call)
    return parts


def call_pieces(
    deltas: Sequence[ToolCallDelta], custom: Collection[str] = ()
) -> list[dict[str, Any]]:
    """A head with id and name, then joined arguments: LiteLLM's Anthropic bridge would lose
    arguments in the head."""
    pieces: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name in custom:
            pieces += _custom_pieces(delta)
            continue
        if delta.name is not None:
            pieces.append(_piece(delta.index, delta.id, delta.name, ""))
        if not delta.arguments:
            continue
        last = pieces[-1] if pieces else None
        if last and last["index"] == delta.index and last["function"]["name"] is None:
            last["function"]["arguments"] += delta.arguments
        else:
            pieces.append(_piece(delta.index, None, None, delta.arguments))
    return pieces


def _custom_pieces(delta: ToolCallDelta) -> list[dict[str, Any]]:
    head = {"id": delta.id, "type": "custom", "custom": {"name": delta.name, "input": ""}}
    text = {"custom": {"input": unwrapped(delta.arguments)}}
    return [{"index": delta.index, **head}, {"index": delta.index, **text}]


def _piece(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}
