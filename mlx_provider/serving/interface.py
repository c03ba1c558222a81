"""What a transport needs of the part that serves requests; `ChatService` is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..protocol.event_queue import EventQueue
from ..protocol.events import Accepted
from ..protocol.figures import Figures
from ..protocol.health import Health
from ..protocol.requests import GenerateRequest, ModelRequest

Put = Callable[[], None]
"""Puts the events of one engine step into the queues of their requests."""

Deliver = Callable[[Put], None]
"""Has `put` run once, where it wakes readers most cheaply; on the engine thread, never blocks."""


def deliver_now(put: Put) -> None:
    """Run it in the calling thread."""
    put()


class Service(Protocol):
    """Serves requests. Every method is safe from any thread."""

    def submit(self, request: ModelRequest, queue: EventQueue) -> Accepted:
        """Validate, render, tokenise, let in; its events then arrive in `queue`.

        Blocks (host work, model load). Raises the errors of `mlx_provider.errors`.
        """

    def count(self, request: GenerateRequest) -> int:
        """Tokens of the prompt that `submit` would make of it; at least so many, where they are
        more than the model's context.

        Blocks and raises as `submit`; nothing is let in.
        """

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is, in `submit`, too. Unknown ids are ignored; never blocks."""

    def health(self) -> Health:
        """State of engine and models; never blocks on the engine thread."""

    def metrics(self) -> bytes:
        """Prometheus text exposition. Blocks as `figures` does."""

    def figures(self) -> Figures:
        """What runs now; waits a moment for the engine thread, never for a model to load."""

    def cache_report(self) -> dict[str, Any]:
        """Prefix cache of each model: entries, bytes, hit rate."""

    def cache_clear(self) -> None:
        """Empty every prefix cache."""

    def cache_shrink(self, share: float) -> None:
        """Keep that share of the prefix cache's bytes; never blocks."""

    def close(self) -> None:
        """End what runs with an error, stop the engine thread, free the models."""
