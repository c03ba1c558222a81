"""Sends a request to a server and measures it, in our protocol or OpenAI's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import httpx

from mlx_provider.commands import EVENT_BATCH, Delta, Done, Event, Failed
from mlx_provider.errors import RequestFailed

from .processes import Dialect, Server

Messages = Sequence[dict[str, Any]]
T = TypeVar("T")
U = TypeVar("U")
TIMEOUT = 1800.0
"""Seconds for a request, to its last byte."""
THINKING = {"enable_thinking": True}
"""mlx-vlm's server turns thinking off by default, which changes the prompt."""


@dataclass(frozen=True)
class Answer:
    """Times in seconds since the request was sent."""

    text: str
    first: float
    """Until the first text; until the end if there was none."""
    total: float
    tokens: int
    cached: int
    """Prompt tokens that the server reports as cached, or 0."""
    failure: str = ""
    prompt: int = 0
    times: tuple[float, ...] = ()
    late: bool = False

    @property
    def pace(self) -> float:
        return (self.tokens - 1) / max(1e-9, self.total - self.first)


@dataclass(frozen=True)
class Run:
    answers: Sequence[Answer]
    seconds: float

    @property
    def rate(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    @property
    def first(self) -> float:
        return median(answer.first for answer in self.answers)


class TooLate(RequestFailed):
    """The reply did not end in time."""


class Client:
    """Safe from several threads."""

    def __init__(
        self, server: Server, said: Mapping[str, Any] | None = None, limit: float = TIMEOUT
    ) -> None:
        """`said`: further fields of each request. `limit`: seconds for each request."""
        self.server = server
        self._said = said or {}
        self._limit = limit
        self._http = httpx.Client(
            base_url=server.url, headers=server.headers, timeout=limit, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def ask(
        self, messages: Messages, max_tokens: int, heard: Callable[[], bool] = lambda: True
    ) -> Answer:
        """Greedy reply. `heard` is called for each piece of text; if it returns False, the
        connection is closed. Raises `RequestFailed` with the server's message, `TooLate`."""
        dialect = self.server.kind.dialect
        path, body = _REQUESTS[dialect](self.server.model, messages, max_tokens)
        body |= self._said
        read: Callable[[Iterator[str]], Iterator[Piece]] = (
            _our_pieces if dialect == "generate" else _chat_pieces
        )
        text, tokens, cached, prompt, times = "", 0, 0, 0, []
        began = time.perf_counter()
        try:
            with self._http.stream("POST", path, json=body) as reply:
                if not reply.is_success:
                    raise RequestFailed(f"HTTP {reply.status_code}: {_error_line(reply.read())}")
                for piece in read(_lines(reply, began + self._limit)):
                    if piece.text:
                        times.append(time.perf_counter() - began)
                    text += piece.text
                    tokens, cached = piece.tokens or tokens, piece.cached or cached
                    prompt = piece.prompt or prompt
                    if piece.text and not heard():
                        break
        except httpx.TimeoutException as error:
            raise TooLate(f"no answer within {self._limit:g} s") from error
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        total = time.perf_counter() - began
        first = times[0] if times else total
        return Answer(text, first, total, tokens, cached, prompt=prompt, times=tuple(times))

    def try_ask(
        self, messages: Messages, max_tokens: int, heard: Callable[[], bool] = lambda: True
    ) -> Answer:
        began = time.perf_counter()
        try:
            return self.ask(messages, max_tokens, heard)
        except RequestFailed as error:
            spent, late = time.perf_counter() - began, isinstance(error, TooLate)
            return Answer("", spent, spent, 0, 0, failure=error.message[:200], late=late)

    def ask_together(
        self,
        prompts: Sequence[Messages],
        max_tokens: int,
        *,
        apart: float = 0.0,
        heard: Callable[[], bool] = lambda: True,
    ) -> list[Answer]:
        """All at once, or `apart` seconds after one another; answers in order."""

        def one(at: int, messages: Messages) -> Answer:
            time.sleep(at * apart)
            return self.try_ask(messages, max_tokens, heard)

        return at_once([partial(one, at, messages) for at, messages in enumerate(prompts)])

    def status(self, messages: Any, said: Mapping[str, Any]) -> tuple[int, str]:
        """HTTP status and text of a malformed request without a stream. `said` replaces fields of
        the request. Raises `RequestFailed`, `TooLate`."""
        _, body = _gateway(self.server.model, messages, 8)
        body = {**body, "stream": False, **said}
        del body["stream_options"]
        try:
            reply = self._http.post("/v1/chat/completions", json=body)
        except httpx.TimeoutException as error:
            raise TooLate(f"no answer within {self._limit:g} s") from error
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        return reply.status_code, reply.text


def at_once(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Each in its own thread, results in order. A signal ends the wait at once; the requests end
    with their server."""
    pool = ThreadPoolExecutor(max(1, len(tasks)))
    try:
        return [each.result() for each in [pool.submit(task) for task in tasks]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def both(one: Callable[[], T], other: Callable[[], U]) -> tuple[T, U]:
    results: list[Any] = at_once([one, other])
    return results[0], results[1]


def _lines(reply: httpx.Response, deadline: float) -> Iterator[str]:
    """Lines of a stream, which must end in time even if bytes never stop."""
    rest = ""
    for text in reply.iter_text():
        if time.perf_counter() > deadline:
            raise TooLate("bytes come, and no end in the time that was allowed")
        *lines, rest = (rest + text).split("\n")
        yield from (line.rstrip("\r") for line in lines)
    if rest:
        yield rest


@dataclass(frozen=True)
class Piece:
    text: str = ""
    tokens: int = 0
    cached: int = 0
    prompt: int = 0


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
        usage = event.usage
        return Piece("", usage.completion_tokens, usage.cached_tokens, usage.prompt_tokens)
    return Piece()


def _chat_pieces(lines: Iterator[str]) -> Iterator[Piece]:
    for line in lines:
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = _event(line[5:])
        if event.get("error"):
            raise RequestFailed(str(event["error"])[:300])
        usage = event.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
        yield Piece(
            "".join(_text(delta) for delta in deltas),
            usage.get("completion_tokens") or usage.get("output_tokens") or 0,
            details.get("cached_tokens") or 0,
            usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        )


def _error_line(body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return (str(message).strip().splitlines() or ["nothing"])[0][:300]


def _event(text: str) -> dict[str, Any]:
    try:
        event: Any = json.loads(text)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise RequestFailed(f"an event that is no JSON object: {text[:100]!r}")
    return event


def _text(delta: dict[str, Any]) -> str:
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return f"{thought}{delta.get('content') or ''}"
