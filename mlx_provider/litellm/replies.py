"""The engine's events as LiteLLM's objects: pieces of messages, log-probabilities, usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from litellm.types.utils import (
    ChatCompletionTokenLogprob,
    ChoiceLogprobs,
    CompletionTokensDetailsWrapper,
    PromptTokensDetailsWrapper,
    TopLogprob,
)
from litellm.types.utils import Usage as LiteLLMUsage

from ..errors import EngineUnavailable
from ..protocol.events import Done, Finish, TokenLogprob, ToolCallDelta
from .call import Call


@dataclass(frozen=True)
class AnswerForm:
    """The form in which a client wants an answer."""

    legacy: bool = False
    """It sends `functions` in place of `tools`."""
    text: bool = False
    """It called `/completions`."""
    timings: bool = False
    """Usage has the engine's times."""

    @classmethod
    def of(cls, call: Call) -> AnswerForm:
        timings = call.params.get("timings") is True
        return cls("functions" in call.params, call.text_completion, timings)


def usage_of(done: Done, *, timings: bool = False) -> LiteLLMUsage:
    """Token counts. Reused tokens stay below the prompt's: LiteLLM's own tests demand it.

    `timings`: with the engine's times, among the details of the completion: of what stands
    beside these, nothing gets through LiteLLM's streams (1.106.2, `calculate_usage`).
    """
    usage = done.usage
    times = {"timings": done.timings.model_dump()} if timings else {}
    cached = max(0, min(usage.cached_tokens, usage.prompt_tokens - 1))
    skipped = {"skipped_tokens": usage.skipped_tokens} if usage.skipped_tokens else {}
    return LiteLLMUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetailsWrapper(cached_tokens=cached, **skipped),
        completion_tokens_details=CompletionTokensDetailsWrapper(
            reasoning_tokens=usage.reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_tokens,
            rejected_prediction_tokens=usage.drafted_tokens - usage.accepted_tokens,
            **times,
        ),
    )


def logprobs_of(tokens: list[TokenLogprob]) -> ChoiceLogprobs | None:
    """OpenAI's form of log-probabilities; `None` where none were asked for."""
    if not tokens:
        return None
    return ChoiceLogprobs(content=[_token(token) for token in tokens])


def _token(token: TokenLogprob) -> ChatCompletionTokenLogprob:
    return ChatCompletionTokenLogprob(
        token=token.token,
        bytes=token.bytes,
        logprob=token.logprob,
        top_logprobs=[
            TopLogprob(token=other.token, bytes=other.bytes, logprob=other.logprob)
            for other in token.top
        ],
    )


def finish_reason(finish: Finish, *, legacy: bool) -> str:
    """OpenAI's word. Raises `EngineUnavailable` where the engine gave up the request itself."""
    if finish.reason == "cancelled":
        raise EngineUnavailable("the engine cancelled the request")
    if legacy and finish.reason == "tool_calls":
        return "function_call"
    return finish.reason


def call_pieces(deltas: list[ToolCallDelta]) -> list[dict[str, Any]]:
    """Tool-call pieces for a stream: a head with id and name, then joined arguments.

    The head carries no arguments: LiteLLM's Anthropic bridge would lose them.
    """
    pieces: list[dict[str, Any]] = []
    for delta in deltas:
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


def _piece(index: int, call_id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"index": index, "id": call_id, "type": "function", "function": function}
