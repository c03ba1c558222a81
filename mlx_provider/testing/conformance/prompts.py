"""Prompts of checks: by a model's own template, with and without an image."""

from __future__ import annotations

from typing import Any

from ...records import Prompt
from ..tiny.models import tiny_image
from .specimens import Specimen

SYSTEM = "You look up weather. " * 8
QUESTION = "How is it in Paris? " * 8
LONG = 75
"""Tokens of a prompt that is longer than a tiny model's sliding window."""


def conversation(of: Specimen, question: str) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": SYSTEM}] if of.model.info.system_role else []
    return [*system, {"role": "user", "content": question}]


def ask(of: Specimen, question: str) -> Prompt:
    messages = [{"role": "user", "content": question}]
    return of.model.prepare(messages, tools=[], media=[], variables={})


def seen(words: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}


def picture(seed: int) -> Any:
    return tiny_image(seed)
