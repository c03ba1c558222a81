"""Ask a server one thing over HTTP and time it, in our protocol or OpenAI's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from mlx_provider.errors import RequestFailed
from mlx_provider.protocol.messages import EVENT_BATCH, Delta, Done, Event, Failed

from .processes import Dialect, Server

Messages = Sequence[dict[str, Any]]
TIMEOUT = 1800.0
THINKING = {"enable_thinking": True}
"""mlx-vlm's server turns thinking off unless told, which changes the prompt."""


@dataclass(frozen=True)
class Answer:
    """What came back. Times in seconds since the request was sent."""

    text: str
    first: float
    """Until the first text; until the end where there was none."""
    total: float
    tokens: int
    cached: int
    """Prompt tokens that the server says it did not compute; 0 where it says nothing."""
    failure: str = ""
    """Why there is no reply, where `try_ask` got none."""


class Client:
    """Requests to one server; safe from several threads."""

    def __init__(self, server: Server, said: Mapping[str, Any] | None = None) -> None:
        """`said`: what each of its requests says besides."""
        self.server = server
        self._said = said or {}
        self._http = httpx.Client(base_url=server.url, headers=server.headers, timeout=TIMEOUT)

    def close(self) -> None:
        self._http.close()

    def ask(self, messages: Messages, max_tokens: int) -> Answer:
        """Greedy reply. Raises `RequestFailed` with what the server said."""
        dialect = self.server.kind.dialect
        path, body = _REQUESTS[dialect](self.server.model, messages, max_tokens)
        body |= self._said
        read: Callable[[Iterator[str]], Iterator[Piece]] = (
            _our_pieces if dialect == "generate" else _chat_pieces
        )
        text, first, tokens, cached = "", 0.0, 0, 0
        began = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as reply:
                if not reply.is_success:
                    raise RequestFailed(f"HTTP {reply.status_code}: {reply.read()[:300]!r}")
                for piece in read(reply.iter_lines()):
                    if piece.text and not text:
                        first = time.perf_counter() - began
                    text += piece.text
                    tokens, cached = piece.tokens or tokens, piece.cached or cached
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        total = time.perf_counter() - began
        return Answer(text, first or total, total, tokens, cached)

    def first_token(self, messages: Messages) -> Answer:
        """A reply of one token: its total time is the time to first token, on every server."""
        return self.ask(messages, 1)

    def try_ask(self, messages: Messages, max_tokens: int) -> Answer:
        """As `ask`, but a request that fails is an empty answer."""
        began = time.perf_counter()
        try:
            return self.ask(messages, max_tokens)
        except RequestFailed as error:
            spent = time.perf_counter() - began
            return Answer("", spent, spent, 0, 0, failure=error.message[:200])

    def ask_together(self, prompts: Sequence[Messages], max_tokens: int) -> list[Answer]:
        """All at once, answers in order."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda messages: self.try_ask(messages, max_tokens), prompts))


@dataclass(frozen=True)
class Piece:
    """One event of a stream."""

    text: str = ""
    tokens: int = 0
    cached: int = 0


def _generate(model: str, messages: Messages, max_tokens: int) -> tuple[str, dict[str, Any]]:
    body = {"model": model, "messages": list(messages), "max_tokens": max_tokens}
    return "/v1/generate", body | {"sampling": {"temperature": 0}}


def _gateway(model: str, messages: Messages, max_tokens: int) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _chat(model: str, messages: Messages, max_tokens: int) -> tuple[str, dict[str, Any]]:
    path, body = _gateway(model, messages, max_tokens)
    return path, body | THINKING


_REQUESTS: Mapping[Dialect, Callable[[str, Messages, int], tuple[str, dict[str, Any]]]] = {
    "generate": _generate,
    "chat": _chat,
    "gateway": _gateway,
}


def _our_pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for line in lines:
        for event in EVENT_BATCH.validate_json(line):
            yield _our_piece(event)


def _our_piece(event: Event) -> Piece:
    if isinstance(event, Failed):
        raise RequestFailed(event.error.message)
    if isinstance(event, Delta):
        return Piece(event.reasoning + event.content)
    if isinstance(event, Done):
        return Piece("", event.usage.completion_tokens, event.usage.cached_tokens)
    return Piece()


def _chat_pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for line in lines:
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[5:])
        if event.get("error"):
            raise RequestFailed(str(event["error"])[:300])
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
        yield Piece(
            "".join(_text(delta) for delta in deltas),
            usage.get("completion_tokens") or usage.get("output_tokens") or 0,
            details.get("cached_tokens") or 0,
        )


def _text(delta: dict[str, Any]) -> str:
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return f"{thought}{delta.get('content') or ''}"
