"""The engine's events in OpenAI's form: the chunks of a stream, a whole answer, an error. LiteLLM's
provider makes its objects from the same choices."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from ...errors import ContextTooLong, EngineUnavailable, MLXProviderError
from ...protocol.event_queue import join_deltas
from ...protocol.events import Accepted, Delta, Done, Event, Finish, TokenLogprob
from .. import api
from ..api import json_bytes

TYPES = {  # of errors, by HTTP status
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
CONTEXT = "This model's maximum context length is exceeded: "
"""By these words LiteLLM recognises a `ContextWindowExceededError` (1.106.2,
`is_error_str_context_window_exceeded`)."""
DONE = b"data: [DONE]\n\n"
ALWAYS_EMPTY: dict[str, Any] = {"refusal": None, "annotations": []}  # members of a message


def error_body(error: MLXProviderError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    other = "invalid_request_error" if error.status < 500 else "server_error"
    message = (CONTEXT if isinstance(error, ContextTooLong) else "") + error.message
    what = {"message": message, "type": TYPES.get(error.status, other)}
    return {"error": {**what, "param": error.param, "code": error.code}}


def finish_reason(finish: Finish | None) -> str:
    """OpenAI's reason. Raises `EngineUnavailable` if the engine cancelled the request."""
    if finish is None:
        return "stop"
    if finish.reason == "cancelled":
        raise EngineUnavailable("the engine cancelled the request")
    return finish.reason


def usage_of(done: Done) -> dict[str, Any]:
    """Usage in OpenAI's form. Fewer tokens are cached than prompted, as LiteLLM's tests demand."""
    usage = done.usage
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
        },
    }


def logprobs_of(tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    """In the form of chat. `None`: there are none."""
    if not tokens:
        return None
    content = [
        {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "bytes": token.bytes, "logprob": token.logprob}


def text_logprobs(tokens: Sequence[TokenLogprob], begins: int = 0) -> dict[str, Any] | None:
    """In the form of text completions: lists of equal length. `None`: there are none. `begins`:
    number of characters in the choice before these tokens, for `text_offset`."""
    if not tokens:
        return None
    offsets = [*accumulate((len(token.token) for token in tokens), initial=begins)]
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {t.token: t.logprob for t in token.top}
            for token in tokens
        ],
        "text_offset": offsets[:-1],
    }


class ChunkChoices:
    """Makes the `choices` of the chunks of one stream."""

    def __init__(self, *, text: bool) -> None:
        """`text`: in the form of text completions, otherwise of chat."""
        self._text = text
        self._begun: set[int] = set()  # indices of choices that have a chunk
        self._written: Counter[int] = Counter()  # by index: characters of tokens so far

    def of(self, event: Event) -> Iterator[dict[str, Any]]:
        """One choice for each kind of output in an event, because clients that collect chunks take
        one kind at a time. Raises the error of a request that the engine cancelled."""
        if isinstance(event, Finish):
            yield self.choice(event.index, reason=finish_reason(event))
        elif isinstance(event, Delta) and self._text:
            begins = self._written[event.index]
            self._written[event.index] += sum(len(token.token) for token in event.logprobs)
            logprobs = text_logprobs(event.logprobs, begins)
            yield self.choice(event.index, {"content": event.content}, logprobs)
        elif isinstance(event, Delta):
            logprobs = logprobs_of(event.logprobs)
            for delta in self._parts(event) or ([{"content": ""}] if logprobs else []):
                yield self.choice(event.index, delta, logprobs)
                logprobs = None

    def choice(
        self,
        index: int = 0,
        delta: dict[str, Any] | None = None,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """One choice of a chunk. The first chunk of a choice in chat gets the role."""
        delta = delta or {}
        if self._text:
            output = {"text": delta.get("content", "")}
        elif index in self._begun:
            output = {"delta": delta}
        else:
            self._begun.add(index)
            output = {"delta": {"role": "assistant", **delta}}
        return {"index": index, **output, "logprobs": logprobs, "finish_reason": reason}

    def _parts(self, event: Delta) -> list[dict[str, Any]]:
        """The `delta`s of chat for each kind of output in an event."""
        texts = {"reasoning_content": event.reasoning, "content": event.content}
        parts: list[dict[str, Any]] = [{name: text} for name, text in texts.items() if text]
        for call in event.tool_calls:
            # arguments come alone: LiteLLM's Anthropic bridge would lose them beside id and name
            pieces = (call.id, call.name, ""), (None, None, call.arguments)
            for call_id, name, arguments in pieces:
                if name is None and not arguments:
                    continue
                function = {"name": name, "arguments": arguments}
                piece = {"index": call.index, "id": call_id, "type": "function"}
                parts.append({"tool_calls": [piece | {"function": function}]})
        return parts


def _head(accepted: Accepted, *, text: bool, chunk: bool = False) -> dict[str, Any]:
    kind = "text_completion" if text else "chat.completion" + ".chunk" * chunk
    name = f"{'cmpl' if text else 'chatcmpl'}-{accepted.id}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": accepted.model}


class Stream(api.Stream):
    def __init__(self, accepted: Accepted, *, text: bool = False, usage: bool = False) -> None:
        """`text`: of text completions, otherwise of chat. `usage`: end with a chunk of usage
        (`stream_options.include_usage`)."""
        self._head = _head(accepted, text=text, chunk=True) | ({"usage": None} if usage else {})
        self._begin = b"data: " + json_bytes(self._head)[:-1] + b',"choices":['
        self._usage = usage
        self._choices = ChunkChoices(text=text)

    def _frames(self, event: Event) -> Iterator[bytes]:
        for choice in self._choices.of(event):
            yield self._begin + json_bytes(choice) + b"]}\n\n"
        if isinstance(event, Done):
            if self._usage:
                yield api.data_frame(self._head | {"choices": [], "usage": usage_of(event)})
            yield DONE

    def _failure(self, error: MLXProviderError) -> Iterator[bytes]:
        yield api.data_frame(error_body(error))


class WholeResponse(api.WholeResponse):
    def __init__(self, accepted: Accepted, *, text: bool = False) -> None:
        self._head = _head(accepted, text=text)
        self._text = text

    def _body(self, events: Sequence[Event], done: Done) -> dict[str, Any]:
        deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        ends = {event.index: event for event in events if isinstance(event, Finish)}
        for event in events:
            if isinstance(event, Delta):
                deltas[event.index].append(event)
        indices = sorted(deltas.keys() | ends)
        answers = [(join_deltas(deltas[index]), ends.get(index)) for index in indices]
        choices = [self._choice(at, *answer) for at, answer in enumerate(answers)]
        return self._head | {"choices": choices, "usage": usage_of(done)}

    def _choice(self, index: int, answer: Delta, finish: Finish | None) -> dict[str, Any]:
        reason = finish_reason(finish)
        output = {"text": answer.content} if self._text else {"message": self._message(answer)}
        logprobs = (text_logprobs if self._text else logprobs_of)(answer.logprobs)
        return {"index": index, **output, "logprobs": logprobs, "finish_reason": reason}

    def _message(self, answer: Delta) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        for call in answer.tool_calls:
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
        content = None if calls and not answer.content else answer.content
        fields: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            fields["tool_calls"] = calls
        if answer.reasoning:
            fields["reasoning_content"] = answer.reasoning
        return fields | ALWAYS_EMPTY
