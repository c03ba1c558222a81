"""What `mlx-provider demo` asks of the shipped model as an OpenAI client, with an engine and a
proxy of its own, and whether the answers are right."""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..client.generation import EngineClient
from ..gateway.config import proxy_config
from ..gateway.engine import answered, gateway_apart, warm_up
from ..gateway.proxy import Proxy
from ..protocol.events import Usage
from ..protocol.health import Health
from ..protocol.requests import GenerateRequest, Sampling

MODEL = "demo"
HYBRID = "demo-hybrid"
"""A model with recurrent layers, and a head that drafts."""
STORY = "Tell me a story."
Message = dict[str, Any]
STREAMED = "Tell me a story."
INTRODUCTION = "My name is Maria."
RECALL = "What is my name?"
NAME = "Maria"
SEEN = "What is this?"
PICTURE = "red circle"
AT_ONCE = {
    "What is the capital of France?": "Paris",
    "Count from 1 to 5.": "1, 2, 3, 4, 5",
    "Say: BANANA": "BANANA",
}


@dataclass(frozen=True)
class Stage:
    """Both processes, ready."""

    proxy: Proxy
    engine: EngineClient

    def health(self) -> Health:
        return self.engine.health()

    def drafted(self) -> tuple[str, Usage]:
        """Who drafts for the model with a head, and what held in a story that it tells."""
        messages = [{"role": "user", "content": STORY}]
        greedy = Sampling(temperature=0)
        asked = GenerateRequest(model=HYBRID, messages=messages, sampling=greedy, max_tokens=200)
        usage = answered(self.engine, asked)
        drafter = next(each.drafter for each in self.health().models if each.model == HYBRID)
        return drafter, usage


@contextmanager
def stage(environ: Mapping[str, str] = os.environ) -> Iterator[Stage]:
    """Start proxy and engine, and end them with the block, whatever ends it.

    Both are the demo's own. Raises `NotInstalled` or `EngineUnavailable` where either cannot start.
    """
    with gateway_apart(proxy_config(MODEL, MODEL), environ) as apart:
        warm_up(apart.engine, MODEL)
        apart.proxy.wait_ready()
        yield Stage(apart.proxy, apart.engine)


@dataclass(frozen=True)
class Measured:
    """A streamed answer with its times at the client."""

    text: str
    finish: str
    first_token: float
    """Seconds from the request to its first text."""
    tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class Check:
    claim: str
    answer: str
    passed: bool


class Scenario:
    """Runs against an OpenAI-compatible server; `client` is an `openai.OpenAI`."""

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._model = model

    def story(self, show: Callable[[str], None]) -> tuple[Measured, Check]:
        """Stream a long answer; `show` gets every piece as it comes."""
        measured = self._stream([_user(STREAMED)], show)
        whole = self._ask([_user(STREAMED)])
        same = bool(measured.text) and measured.text == whole and measured.finish == "stop"
        return measured, Check("the same text streamed and in one piece", whole, same)

    def recall(self) -> tuple[Measured, Check]:
        """Two turns of one conversation: the second needs the first."""
        turns = [_user(INTRODUCTION)]
        turns += [{"role": "assistant", "content": self._ask(turns)}, _user(RECALL)]
        measured = self._stream(turns, lambda piece: None)
        return measured, Check(f"{RECALL} {NAME}", measured.text, NAME in measured.text)

    def at_once(self) -> list[Check]:
        """Three requests at the same time, each answered as if it were alone."""
        with ThreadPoolExecutor(len(AT_ONCE)) as pool:
            answers = list(pool.map(lambda question: self._ask([_user(question)]), AT_ONCE))
        return [
            Check(f"{question} {wanted}", answer, wanted in answer)
            for (question, wanted), answer in zip(AT_ONCE.items(), answers, strict=True)
        ]

    def see(self) -> Check:
        """A picture drawn here and now, and a question about it."""
        parts = [
            {"type": "image_url", "image_url": {"url": red_circle()}},
            {"type": "text", "text": SEEN},
        ]
        answer = self._ask([{"role": "user", "content": parts}])
        return Check(f"{SEEN} a {PICTURE}", answer, PICTURE in answer)

    def _ask(self, messages: list[Message]) -> str:
        reply = self._client.chat.completions.create(**self._request(messages))
        return reply.choices[0].message.content or ""

    def _stream(self, messages: list[Message], show: Callable[[str], None]) -> Measured:
        start = time.perf_counter()
        chunks = self._client.chat.completions.create(
            **self._request(messages), stream=True, stream_options={"include_usage": True}
        )
        text, times, finish, usage = "", [start], "", None
        for piece, reason, counted in _pieces(chunks):
            if piece:
                times.append(time.perf_counter())
                text += piece
                show(piece)
            finish, usage = reason or finish, counted or usage
        spoken = times[-1] - times[min(1, len(times) - 1)]
        tokens = usage.completion_tokens if usage else 0
        details = usage.prompt_tokens_details if usage else None
        return Measured(
            text=text,
            finish=finish,
            first_token=times[min(1, len(times) - 1)] - start,
            tokens_per_second=(tokens - 1) / spoken if spoken > 0 else 0.0,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
        )

    def _request(self, messages: list[Message]) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 200,
        }


def red_circle() -> str:
    """A PNG as a data URL: 96 x 96 pixels, a red circle on white."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (96, 96), (255, 255, 255))
    ImageDraw.Draw(image).ellipse([12, 12, 84, 84], fill=(215, 30, 35))
    written = io.BytesIO()
    image.save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def _pieces(chunks: Any) -> Iterator[tuple[str, str | None, Any]]:
    """(text, finish reason, usage) of every chunk."""
    for chunk in chunks:
        choice = chunk.choices[0] if chunk.choices else None
        text = (choice.delta.content or "") if choice else ""
        yield text, choice.finish_reason if choice else None, getattr(chunk, "usage", None)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
