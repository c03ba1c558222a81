"""An OpenAI client, and its replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_provider.errors import EngineUnavailable

from .stage import Staged

SECONDS = 3600.0
"""For one reply: a long prompt takes its time on a small machine."""


@dataclass(frozen=True)
class Made:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """A complete reply, or the failure."""

    text: str = ""
    thought: str = ""
    calls: tuple[Made, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    skipped: int = 0
    """Prompt tokens that sparse prefill has left out."""
    tokens: int = 0
    failure: str = ""

    def message(self) -> dict[str, Any]:
        """The reply as a message of the next request."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message

    def same_as(self, other: Reply) -> bool:
        """Whether both have the same text and calls; ids of calls differ."""
        return self.encoded() == other.encoded()

    def encoded(self) -> dict[str, Any]:
        """The reply for a transcript."""
        encoded: dict[str, Any] = {"text": self.text, "finish": self.finish}
        if self.thought:
            encoded["thought"] = self.thought
        if self.calls:
            encoded["calls"] = [{"name": c.name, "arguments": c.arguments} for c in self.calls]
        if self.failure:
            encoded["failure"] = self.failure
        return encoded


class Client:
    """Sends requests for one subject through its gateway, with greedy decoding. Thread-safe."""

    def __init__(self, staged: Staged, max_tokens: int, said: Mapping[str, Any]) -> None:
        """`said`: further fields of every request."""
        import openai

        self._staged = staged
        self._body = {"max_tokens": max_tokens, "temperature": 0}
        self._said = dict(said)
        self._openai = openai.OpenAI(
            base_url=f"{staged.url}/v1",
            api_key=staged.key,
            max_retries=0,
            timeout=SECONDS,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback needs no proxy
        )

    def close(self) -> None:
        self._openai.close()

    def ask(self, messages: Sequence[Mapping[str, Any]], *, stream: bool, **more: Any) -> Reply:
        """One reply. A request that fails is a reply with a failure, unless the gateway has ended,
        which raises `EngineUnavailable`."""
        import openai

        body = {"model": self._staged.name, "messages": list(messages), **self._body, **more}
        body["extra_body"] = self._said
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            made = self._openai.chat.completions.create(**body)
            return _assembled(made) if stream else _read(made)
        except openai.APIStatusError as error:
            return Reply(failure=f"HTTP {error.status_code}: {error.message[:500]}")
        except openai.APIError as error:
            self._staged.require_gateway()
            return Reply(failure=f"{type(error).__name__}: {error.message[:500]}")
        except RuntimeError as error:  # closed during the request
            raise EngineUnavailable(f"the request was given up: {error}") from None


@dataclass
class _Growing:
    text: str = ""
    thought: str = ""
    finish: str = ""
    prompt_tokens: int = 0
    skipped: int = 0
    tokens: int = 0
    calls: dict[int, list[str]] = field(default_factory=dict)

    def take(self, delta: Any) -> None:
        self.text += delta.content or ""
        self.thought += getattr(delta, "reasoning_content", None) or ""
        for piece in delta.tool_calls or ():
            call = self.calls.setdefault(piece.index, ["", "", ""])
            call[0] = call[0] or piece.id or ""
            if piece.function is not None:
                call[1] += piece.function.name or ""
                call[2] += piece.function.arguments or ""

    def count(self, usage: Any) -> None:
        if usage is not None:
            self.prompt_tokens, self.tokens = usage.prompt_tokens, usage.completion_tokens
            self.skipped = getattr(usage.prompt_tokens_details, "skipped_tokens", 0) or 0

    def whole(self) -> Reply:
        calls = tuple(Made(*self.calls[index]) for index in sorted(self.calls))
        counts = (self.prompt_tokens, self.skipped, self.tokens)
        return Reply(self.text, self.thought, calls, self.finish, *counts)


def _assembled(chunks: Iterable[Any]) -> Reply:
    reply = _Growing()
    for chunk in chunks:
        for choice in chunk.choices:
            reply.take(choice.delta)
            reply.finish = choice.finish_reason or reply.finish
        reply.count(getattr(chunk, "usage", None))
    return reply.whole()


def _read(completion: Any) -> Reply:
    (choice,) = completion.choices
    reply = _Growing(finish=choice.finish_reason or "")
    reply.text = choice.message.content or ""
    reply.thought = getattr(choice.message, "reasoning_content", None) or ""
    for index, call in enumerate(choice.message.tool_calls or ()):
        reply.calls[index] = [call.id, call.function.name, call.function.arguments]
    reply.count(completion.usage)
    return reply.whole()
