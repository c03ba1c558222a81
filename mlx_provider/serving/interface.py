"""What a transport needs of the part that serves requests; `ChatService` is the real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..protocol.event_queue import Mailbox
from ..protocol.messages import Accepted, Event, GenerateRequest, Health

Post = tuple[Mailbox, list[Event]]
"""Events for one request's reader."""

Deliver = Callable[[list[Post]], None]
"""Takes all posts of one engine step in one call, on the engine thread; must not block."""


def deliver_now(posts: list[Post]) -> None:
    """Put every post into its mailbox, in the calling thread."""
    for mailbox, events in posts:
        mailbox.put(events)


class Service(Protocol):
    """Serves requests. Every method is safe from any thread."""

    def submit(self, request: GenerateRequest, mailbox: Mailbox) -> Accepted:
        """Validate, render, tokenise and queue; events then arrive in `mailbox`.

        Blocks (host work, model load). Raises the errors of `mlx_provider.errors`.
        """

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is. Unknown ids are ignored. Never blocks."""

    def health(self) -> Health:
        """State of engine and models; never blocks on the engine thread."""

    def metrics(self) -> bytes:
        """Prometheus text exposition."""

    def cache_report(self) -> dict[str, Any]:
        """Prefix store of each model: entries, bytes, hit rate."""

    def cache_clear(self) -> None:
        """Empty every prefix store."""

    def close(self) -> None:
        """End what runs with an error, stop the engine thread, free the models."""
