"""An OpenAI client of the gateway's proxy, which reads each stream into one `Reply`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .subjects import LoadedSubject

REPLY_TIMEOUT = 3600.0  # seconds; a long prompt is slow on a small machine


@dataclass(frozen=True)
class ReplyCall:
    """A call in a reply."""

    id: str
    name: str
    arguments: str  # as the model wrote them; JSON if all went well

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "arguments": self.arguments}


@dataclass(frozen=True)
class Reply:
    """A whole reply; of a failed request, only `failure` is set."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ReplyCall, ...] = ()
    finish: str = ""  # the finish reason
    prompt_tokens: int = 0
    skipped_tokens: int = 0  # tokens of the prompt that sparse prefill left out
    completion_tokens: int = 0
    failure: str = ""

    def message(self) -> dict[str, Any]:
        """The reply as a message of the next request."""
        calls = [{"id": c.id, "type": "function", "function": c.as_json()} for c in self.calls]
        message = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message

    def as_json(self) -> dict[str, Any]:
        """The reply for the result, without counts, ids and empty parts."""
        calls = [call.as_json() for call in self.calls]
        optional = {"reasoning": self.reasoning, "calls": calls, "failure": self.failure}
        present = {name: value for name, value in optional.items() if value}
        return {"text": self.text, "finish": self.finish, **present}


class Client:
    """Sends greedy requests to one subject, until `close`. `body`: further fields of each."""

    def __init__(self, loaded: LoadedSubject, max_tokens: int, body: Mapping[str, Any]) -> None:
        import openai

        self._proxy = loaded.gateway.proxy
        self._body: dict[str, Any] = {
            "model": loaded.name, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "extra_body": dict(body),
        }  # fmt: skip
        direct = openai.DefaultHttpxClient(trust_env=False)  # loopback needs no proxy
        self._openai = openai.OpenAI(
            base_url=f"{self._proxy.url}/v1", api_key=self._proxy.key, max_retries=0,
            timeout=REPLY_TIMEOUT, http_client=direct,
        )  # fmt: skip
        self.close = self._openai.close

    def ask(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> Reply:
        """The reply to one request with the fields `more`. If the request fails, the reply has a
        `failure`. Raises `EngineUnavailable` with the log's last lines if the proxy has ended."""
        import openai

        body = {**self._body, "messages": list(messages), **more}
        try:
            return _assemble(self._openai.chat.completions.create(**body))
        except openai.APIStatusError as error:
            return Reply(failure=f"HTTP {error.status_code}: {error.message[:500]}")
        except openai.APIError as error:
            if self._proxy.process.poll() is not None:
                self._proxy.wait_ready()  # raises, with the end of the log
            return Reply(failure=f"{type(error).__name__}: {error.message[:500]}")


def _assemble(chunks: Iterable[Any]) -> Reply:
    text = reasoning = finish = ""
    counts = (0, 0, 0)  # tokens: of the prompt, skipped, of the reply
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
