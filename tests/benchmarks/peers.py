"""The servers of the peers beside ours, through OpenAI's chat completions, and questions to all."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from mlx_provider.errors import RequestFailed
from mlx_provider_bench.model_speed import ORDER, WORDS
from random_weights import IMAGE_EDGE
from servers import (
    Answer,
    Kind,
    Messages,
    Piece,
    at_once,
)
from tiny.models import tiny_pixels

T = TypeVar("T")
U = TypeVar("U")
PREFILL_STEP = "2048"
"""Prompt tokens of one chunk, the same for every side."""
THINKING = {"enable_thinking": True}
"""mlx-vlm's server turns thinking off by default, which changes the prompt."""
REPEATS = 3
HELLO: Messages = [{"role": "user", "content": "Hello there, how are you?"}]


def gateway_request(model: str, messages: Messages, max_tokens: int) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def chat_request(model: str, messages: Messages, max_tokens: int) -> tuple[str, dict[str, Any]]:
    path, body = gateway_request(model, messages, max_tokens)
    return path, body | THINKING


def chat_pieces(lines: Iterator[str]) -> Iterator[Piece]:
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


def through_proxy(name: str, **more: Any) -> Kind:
    """A server that is asked through a LiteLLM proxy, or like one, and started by others."""
    return Kind(name, (), gateway_request, chat_pieces, **more)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(Path(__file__).with_name("peer_process.py")), name, *arguments)


MLX_LM = Kind(
    name="mlx_lm.server",
    command=_module(
        *("mlx_lm.server", "--prefill-step-size", PREFILL_STEP, "--log-level", "WARNING")
    ),
    request=chat_request,
    read=chat_pieces,
    images=False,
)
MLX_VLM = Kind(
    name="mlx_vlm.server",
    command=_module("mlx_vlm.server", "--prefill-step-size", PREFILL_STEP),
    request=chat_request,
    read=chat_pieces,
    environment={"APC_ENABLED": "1", "APC_DISK_ENABLED": "0", "APC_NUM_BLOCKS": "8192"},
)
"""With its prefix cache on, which is off by default, and room for 128k tokens."""


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


def both(one: Callable[[], T], other: Callable[[], U]) -> tuple[T, U]:
    results: list[Any] = at_once([one, other])
    return results[0], results[1]


def image_part(seed: int, height: int, width: int) -> dict[str, Any]:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(tiny_pixels(seed, height, width)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True)
class Asked:
    document: str
    question: str
    image: int | None = None
    """Seed of an image before the document."""
    image_edge: int = IMAGE_EDGE
    turns: tuple[tuple[str, str], ...] = ()

    def asking(self, question: str) -> Asked:
        return replace(self, question=question)

    def followed_by(self, reply: str, question: str) -> Asked:
        return replace(self, question=question, turns=(*self.turns, (self.question, reply)))


def words_of(asked: Asked, image: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    opening: Any = asked.document
    if asked.image is not None:
        opening = [dict(image or {}), {"type": "text", "text": opening}]
    turns = [text for turn in asked.turns for text in turn]
    said = enumerate([opening, "I have read it.", *turns, asked.question])
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in said]


def messages_of(asked: Asked) -> list[dict[str, Any]]:
    if asked.image is None:
        return words_of(asked, None)
    return words_of(asked, image_part(asked.image, asked.image_edge, asked.image_edge))


def same(answer: Answer, truth: str) -> bool:
    """Peers drop a reply's leading space."""
    return answer.text.strip() == truth.strip()


def questions(part: str, count: int, turn: int, words: int) -> list[Messages]:
    """`words` words to twice as many."""
    dice = random.Random(f"{part} {count} {turn}")
    lengths = [max(4, words * (2 + i % 3) // 2) for i in range(count)]
    return [_message(" ".join(dice.choice(WORDS) for _ in range(length))) for length in lengths]


def document(name: str, words: int) -> str:
    dice = random.Random(name)
    return " ".join(dice.choice(WORDS) for _ in range(words))


def _message(text: str) -> Messages:
    return [{"role": "user", "content": f"{text}. {ORDER}"}]
