"""An OpenAI client of the gateway's proxy, which reads each stream into one `Reply`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .subjects import LoadedSubject

REPLY_TIMEOUT = 3600.0
"""Seconds. A long prompt is slow on a small machine."""


@dataclass(frozen=True)
class ReplyCall:
    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(frozen=True)
class Reply:
    text: str = ""
    reasoning: str = ""
    calls: tuple[ReplyCall, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    skipped_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""

    def message(self) -> dict[str, Any]:
        calls = [{"id": c.id, "type": "function", "function": c.as_json()} for c in self.calls]
        message = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message

    def as_json(self) -> dict[str, Any]:
        calls = [call.as_json() for call in self.calls]
        optional = {"reasoning": self.reasoning, "calls": calls, "failure": self.failure}
        present = {name: value for name, value in optional.items() if value}
        return {"text": self.text, "finish": self.finish, **present}


class Client:
    def __init__(self, loaded: LoadedSubject, max_tokens: int, body: Mapping[str, Any]) -> None:
        """`body`: further fields of every request."""
        import openai

        self._proxy = loaded.gateway.proxy
        self._body: dict[str, Any] = {
            "model": loaded.name,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": dict(body),
        }
        self._openai = openai.OpenAI(
            base_url=f"{self._proxy.url}/v1",
            api_key=self._proxy.key,
            max_retries=0,
            timeout=REPLY_TIMEOUT,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback needs no proxy
        )
        self.close = self._openai.close

    def ask(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> Reply:
        """One reply; of a request that fails, one with a `failure`. Raises `EngineUnavailable`
        with the log's last lines if the gateway has ended."""
        import openai

        body = {**self._body, "messages": list(messages), **more}
        try:
            return _assemble(self._openai.chat.completions.create(**body))
        except openai.APIStatusError as error:
            return Reply(failure=f"HTTP {error.status_code}: {error.message[:500]}")
        except openai.APIError as error:
            if self._proxy.process.poll() is not None:
                self._proxy.wait_ready()
            return Reply(failure=f"{type(error).__name__}: {error.message[:500]}")


def _assemble(chunks: Iterable[Any]) -> Reply:
    text = reasoning = finish = ""
    counts = (0, 0, 0)
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            text += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for piece in delta.tool_calls or ():
                call = calls.setdefault(piece.index, ["", "", ""])
                call[0] = call[0] or piece.id or ""
                if piece.function is not None:
                    call[1] += piece.function.name or ""
                    call[2] += piece.function.arguments or ""
        if (usage := getattr(chunk, "usage", None)) is not None:
            skipped = getattr(usage.prompt_tokens_details, "skipped_tokens", 0) or 0
            counts = (usage.prompt_tokens, skipped, usage.completion_tokens)
    reply_calls = tuple(ReplyCall(*calls[index]) for index in sorted(calls))
    return Reply(text, reasoning, reply_calls, finish, *counts)
