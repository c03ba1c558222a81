"""An OpenAI client of the gateway, and its replies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .subjects import Staged

SECONDS = 3600.0
"""For one reply: a long prompt takes its time on a small machine."""


@dataclass(frozen=True)
class Made:
    """A call."""

    id: str
    name: str
    arguments: str

    def encoded(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


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
                {"id": each.id, "type": "function", "function": each.encoded()}
                for each in self.calls
            ]
        return message

    def encoded(self) -> dict[str, Any]:
        """The reply for a transcript, without ids and counts."""
        calls = [each.encoded() for each in self.calls]
        optional = {"thought": self.thought, "calls": calls, "failure": self.failure}
        present = {name: value for name, value in optional.items() if value}
        return {"text": self.text, "finish": self.finish, **present}


class Client:
    """Sends requests for one subject through its gateway, with greedy decoding."""

    def __init__(self, staged: Staged, max_tokens: int, body: Mapping[str, Any]) -> None:
        """`body`: further fields of every request."""
        import openai

        self._proxy = staged.apart.proxy
        self._body = {
            "model": staged.name,
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_body": dict(body),
        }
        self._openai = openai.OpenAI(
            base_url=f"{self._proxy.url}/v1",
            api_key=self._proxy.key,
            max_retries=0,
            timeout=SECONDS,
            http_client=openai.DefaultHttpxClient(trust_env=False),  # loopback needs no proxy
        )

    def close(self) -> None:
        self._openai.close()

    def ask(self, messages: Sequence[Mapping[str, Any]], *, stream: bool, **more: Any) -> Reply:
        """One reply. A request that fails is a reply with a failure.

        Raises `EngineUnavailable` with the log's last lines if the gateway has ended.
        """
        import openai

        body = {**self._body, "messages": list(messages), **more}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            made = self._openai.chat.completions.create(**body)
            return _assembled(made, "delta") if stream else _assembled([made], "message")
        except openai.APIStatusError as error:
            return Reply(failure=f"HTTP {error.status_code}: {error.message[:500]}")
        except openai.APIError as error:
            if self._proxy.process.poll() is not None:
                self._proxy.wait_ready()
            return Reply(failure=f"{type(error).__name__}: {error.message[:500]}")


def _assembled(chunks: Iterable[Any], part: Literal["delta", "message"]) -> Reply:
    text = thought = finish = ""
    prompt_tokens = skipped = tokens = 0
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            said = getattr(choice, part)
            text += said.content or ""
            thought += getattr(said, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for number, piece in enumerate(said.tool_calls or ()):
                call = calls.setdefault(piece.index if part == "delta" else number, ["", "", ""])
                call[0] = call[0] or piece.id or ""
                if piece.function is not None:
                    call[1] += piece.function.name or ""
                    call[2] += piece.function.arguments or ""
        if (usage := getattr(chunk, "usage", None)) is not None:
            prompt_tokens, tokens = usage.prompt_tokens, usage.completion_tokens
            skipped = getattr(usage.prompt_tokens_details, "skipped_tokens", 0) or 0
    made = tuple(Made(*calls[index]) for index in sorted(calls))
    return Reply(text, thought, made, finish, prompt_tokens, skipped, tokens)
