"""The prefix benchmark's questions, and asking them of three servers over HTTP."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_provider.errors import EngineUnavailable, RequestFailed

from ..models.random_weights import IMAGE_EDGE, WORDS
from ..report import Result
from .client import Answer, Client, Messages
from .processes import OURS, PEERS, Kind, running

REPEATS = 3
HELLO: Messages = [{"role": "user", "content": "Hello there, how are you?"}]


@dataclass(frozen=True)
class Asked:
    """A question about a document, and what was said in between."""

    document: str
    question: str
    image: int | None = None
    """Seed of an image that stands before the document."""
    image_edge: int = IMAGE_EDGE
    turns: tuple[tuple[str, str], ...] = ()
    """Earlier questions and their replies."""
    joined: bool = False
    """The question ends the document's own message; there are no turns."""

    def asking(self, question: str) -> Asked:
        """The same document with another question."""
        return replace(self, question=question)

    def followed_by(self, reply: str, question: str) -> Asked:
        """The next turn."""
        return replace(self, question=question, turns=(*self.turns, (self.question, reply)))


def words_of(asked: Asked, image: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Messages; `image`: the part that stands for the image."""
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


def short_stories(count: int, turn: int) -> list[Messages]:
    """Questions that the demo models answer at length, no two alike."""
    words = [WORDS[(7 * turn + at) % len(WORDS)] for at in range(count)]
    return [[{"role": "user", "content": f"Tell me a story. {word}"}] for word in words]


def image_part(seed: int, height: int, width: int) -> dict[str, Any]:
    """A part with a PNG in a data URL."""
    from PIL import Image

    from mlx_provider.testing.tiny_media import tiny_pixels

    file = io.BytesIO()
    Image.fromarray(tiny_pixels(seed, height, width)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


Truths = Sequence[tuple[Asked, str]]
"""Questions in the order they are asked, with the right reply to each."""


def over_http(
    folder: Path, variant: str, truths: Truths, reply: int, scratch: Path
) -> list[Result]:
    """Every server on the same questions: (first question, next turn) of each document in turn.

    The second of each pair is asked of a cache that knows the first.
    """
    pairs = list(zip(truths[::2], truths[1::2], strict=True))

    def ask(client: Client) -> list[Result]:
        return [_one_document(client, variant, *pair, reply) for pair in pairs]

    return _on_each(folder, variant, truths, scratch, ask)


def talk_over_http(
    folder: Path, variant: str, truths: Truths, reply: int, scratch: Path
) -> list[Result]:
    """Every server through the turns of one conversation."""
    return _on_each(
        folder, variant, truths, scratch, lambda client: [_talk(client, variant, truths, reply)]
    )


def _on_each(
    folder: Path,
    variant: str,
    truths: Truths,
    scratch: Path,
    ask: Callable[[Client], list[Result]],
) -> list[Result]:
    found: list[Result] = []
    for kind in (OURS, *PEERS):
        if not kind.images and any(asked.image is not None for asked, _ in truths):
            found.append(_skipped(kind, variant, "takes no images"))
            continue
        try:
            with running(kind, folder, scratch / f"{kind.name}.log") as server:
                client = Client(server)
                client.ask(HELLO, 4)
                found += ask(client)
                client.close()
        except (EngineUnavailable, RequestFailed) as error:
            found.append(_skipped(kind, variant, error.message))
    return found


def _talk(client: Client, variant: str, truths: Truths, reply: int) -> Result:
    turns, right = [], 0
    for asked, truth in truths:
        messages = messages_of(asked)
        turns.append(client.first_token(messages))
        right += same(client.ask(messages, reply), truth)
    seconds = [one.total for one in turns]
    later = statistics.mean(seconds[1:])
    return {
        "server": client.server.kind.name,
        "variant": variant,
        "turn_seconds": seconds,
        "cached_tokens": [one.cached for one in turns],
        "later_seconds": later,
        "first_over_later": round(seconds[0] / later, 2),
        "right": f"{right}/{len(truths)}",
    }


def _one_document(
    client: Client, variant: str, first: tuple[Asked, str], other: tuple[Asked, str], reply: int
) -> Result:
    base, others = messages_of(first[0]), messages_of(other[0])
    cold = client.first_token(base)
    repeats = [client.first_token(base) for _ in range(REPEATS)]
    hit = client.first_token(others)
    answers = [client.ask(base, reply), client.ask(others, reply)]
    right = [same(a, truth) for a, (_, truth) in zip(answers, (first, other), strict=True)]
    repeat = statistics.median(one.total for one in repeats)
    return {
        "server": client.server.kind.name,
        "variant": variant,
        "document_characters": len(first[0].document),
        "cold_seconds": cold.total,
        "repeat_seconds": repeat,
        "next_turn_seconds": hit.total,
        "cached_tokens": {"repeat": repeats[0].cached, "next_turn": hit.cached},
        "cold_over_repeat": round(cold.total / repeat, 2),
        "cold_over_next_turn": round(cold.total / hit.total, 2),
        "right": f"{sum(right)}/{len(right)}",
    }


def messages_of(asked: Asked) -> list[dict[str, Any]]:
    """As a server is asked it: an image is a PNG in a data URL."""
    if asked.image is None:
        return words_of(asked, None)
    return words_of(asked, image_part(asked.image, asked.image_edge, asked.image_edge))


def same(answer: Answer, truth: str) -> bool:
    """Equal texts; peers drop a reply's leading space."""
    return answer.text.strip() == truth.strip()


def _skipped(kind: Kind, variant: str, why: str) -> Result:
    return {"server": kind.name, "variant": variant, "skipped": why[:200]}
