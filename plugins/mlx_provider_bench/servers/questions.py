"""The prefix benchmark's questions, and asking them of three servers over HTTP."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..models.random_weights import IMAGE_EDGE
from .client import Answer, Messages

REPEATS = 3
HELLO: Messages = [{"role": "user", "content": "Hello there, how are you?"}]


@dataclass(frozen=True)
class Asked:
    document: str
    question: str
    image: int | None = None
    """Seed of an image before the document."""
    image_edge: int = IMAGE_EDGE
    turns: tuple[tuple[str, str], ...] = ()
    joined: bool = False
    """The question ends the document's own message; there are no turns."""

    def asking(self, question: str) -> Asked:
        return replace(self, question=question)

    def followed_by(self, reply: str, question: str) -> Asked:
        return replace(self, question=question, turns=(*self.turns, (self.question, reply)))


def words_of(asked: Asked, image: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    text = f"{asked.document}\n{asked.question}" if asked.joined else asked.document
    opening: Any = text
    if asked.image is not None:
        opening = [dict(image or {}), {"type": "text", "text": text}]
    if asked.joined:
        return [{"role": "user", "content": opening}]
    messages = [
        {"role": "user", "content": opening},
        {"role": "assistant", "content": "I have read it."},
    ]
    for question, reply in asked.turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": reply})
    return [*messages, {"role": "user", "content": asked.question}]


def image_part(seed: int, height: int, width: int) -> dict[str, Any]:
    from PIL import Image

    from mlx_provider.testing.tiny.models import tiny_pixels

    file = io.BytesIO()
    Image.fromarray(tiny_pixels(seed, height, width)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def messages_of(asked: Asked) -> list[dict[str, Any]]:
    if asked.image is None:
        return words_of(asked, None)
    return words_of(asked, image_part(asked.image, asked.image_edge, asked.image_edge))


def same(answer: Answer, truth: str) -> bool:
    """Peers drop a reply's leading space."""
    return answer.text.strip() == truth.strip()
