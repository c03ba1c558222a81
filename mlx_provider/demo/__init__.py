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

from ..gateway.config import proxy_config
from ..gateway.engine import SeparateGateway, separate_gateway, warm_up

MODEL = "demo"
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


@contextmanager
def stage(environ: Mapping[str, str] = os.environ) -> Iterator[SeparateGateway]:
    """Start proxy and engine of the demo alone, and end them with the block. Raises `NotInstalled`
    or `EngineUnavailable` if one cannot start."""
    with separate_gateway(proxy_config(MODEL, MODEL), environ) as apart:
        warm_up(apart.engine, MODEL)
        apart.proxy.wait_ready()
        yield apart


@dataclass(frozen=True)
class Measured:
    """A streamed answer with its times at the client."""

    text: str
    finish: str
    first_token: float
    """Seconds from the request to its first text."""
    tokens_per_second: float
    usage: Any
    """As OpenAI's client gives it."""


@dataclass(frozen=True)
class Check:
    claim: str
    answer: str
    passed: bool


class Scenario:
    """Runs against an OpenAI-compatible server; `client` is an `openai.OpenAI`."""

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._request = {"model": model, "temperature": 0, "max_tokens": 200}

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
        image = {"type": "image_url", "image_url": {"url": red_circle()}}
        answer = self._ask([_user([image, {"type": "text", "text": SEEN}])])
        return Check(f"{SEEN} a {PICTURE}", answer, PICTURE in answer)

    def _ask(self, messages: list[Message]) -> str:
        reply = self._client.chat.completions.create(messages=messages, **self._request)
        return reply.choices[0].message.content or ""

    def _stream(self, messages: list[Message], show: Callable[[str], None]) -> Measured:
        start = time.perf_counter()
        chunks = self._client.chat.completions.create(
            messages=messages, **self._request, stream=True, stream_options={"include_usage": True}
        )
        text, times, finish, usage = "", [], "", None
        for chunk in chunks:
            choice = chunk.choices[0] if chunk.choices else None
            if choice and choice.delta.content:
                times.append(time.perf_counter())
                text += choice.delta.content
                show(choice.delta.content)
            finish = (choice.finish_reason if choice else None) or finish
            usage = getattr(chunk, "usage", None) or usage
        times = times or [start]
        spoken, tokens = times[-1] - times[0], usage.completion_tokens if usage else 0
        rate = (tokens - 1) / spoken if spoken > 0 else 0.0
        return Measured(text, finish, times[0] - start, rate, usage)


def red_circle() -> str:
    """A PNG as a data URL: 96 x 96 pixels, a red circle on white."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (96, 96), (255, 255, 255))
    ImageDraw.Draw(image).ellipse([12, 12, 84, 84], fill=(215, 30, 35))
    written = io.BytesIO()
    image.save(written, "PNG")
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}
