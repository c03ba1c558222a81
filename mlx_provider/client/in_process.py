"""The engine as a thread of this process."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..protocol.event_queue import EventQueue
from ..protocol.figures import Figures
from ..protocol.health import Health
from ..protocol.requests import GenerateRequest, ModelRequest
from ..serving.interface import Service
from .generation import Generation


class InProcessClient:
    """`EngineClient` over a service object: the same objects, no JSON between."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def submit(self, request: ModelRequest) -> Generation:
        """Block until the request is accepted; raises the service's errors."""
        queue = EventQueue()
        accepted = self._service.submit(request, queue)
        return Generation(accepted, queue, partial(self._service.cancel, accepted.id))

    def count(self, request: GenerateRequest) -> int:
        """Tokens of the prompt; raises the service's errors."""
        return self._service.count(request)

    def health(self) -> Health:
        """State of the service."""
        return self._service.health()

    def metrics(self) -> bytes:
        """Prometheus text exposition."""
        return self._service.metrics()

    def figures(self) -> Figures:
        """What runs now."""
        return self._service.figures()

    def cache_report(self) -> dict[str, Any]:
        """Prefix cache of each model."""
        return self._service.cache_report()

    def cache_clear(self) -> None:
        """Empty every prefix cache."""
        self._service.cache_clear()

    def close(self) -> None:
        """End what runs and free the models."""
        self._service.close()
