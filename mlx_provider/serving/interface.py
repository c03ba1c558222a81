"""What a transport calls; `ChatService` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted
from ..protocol.health import Figures, Health
from ..protocol.requests import GenerateRequest, ModelRequest

Put = Callable[[], None]
"""Puts the events of one engine step into their requests' queues."""

Deliver = Callable[[Put], None]
"""Runs `put` where it wakes readers most cheaply. Called on the engine thread; never blocks."""


def deliver_now(put: Put) -> None:
    put()


@dataclass(frozen=True)
class PromptTokens:
    tokens: Sequence[int]
    text: str
    """With special tokens."""
    context_length: int


class Service(Protocol):
    def submit(self, request: ModelRequest, queue: EventQueue) -> Accepted:
        """Validate, render, tokenise, admit. The events of the request then arrive in `queue`.

        Blocks (host work, model load). Raises the errors of `mlx_provider.errors`.
        """

    def count(self, request: GenerateRequest) -> int:
        """Tokens of the prompt that `submit` would use; a lower limit if that exceeds the context.
        Blocks and raises like `submit`."""

    def tokenize(self, request: GenerateRequest) -> PromptTokens:
        """The prompt that `submit` would use. Blocks and raises like `submit`."""

    def cancel(self, request_id: str) -> None:
        """End a request in any phase, also during `submit`. Ignores unknown ids; never blocks."""

    def health(self) -> Health:
        """State of engine and models. Never blocks on the engine thread."""

    def metrics(self) -> bytes:
        """Prometheus text exposition. Blocks like `figures`."""

    def figures(self) -> Figures:
        """Live statistics. Waits briefly for the engine thread, never for the load of a model."""

    def cache_report(self) -> dict[str, Any]:
        """Prefix cache of each model: entries, bytes, hit rate."""

    def cache_clear(self) -> None:
        """Empty every prefix cache."""

    def cache_shrink(self, share: float) -> None:
        """Keep this share of the prefix cache's bytes. Never blocks."""

    def close(self) -> None:
        """End running requests with an error, stop the engine thread, free the models."""
