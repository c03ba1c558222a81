"""The engine as a thread of this process."""

from __future__ import annotations

from functools import partial

from ..protocol.event_queue import EventQueue
from ..protocol.requests import ModelRequest
from ..serving.interface import Service
from .generation import Generation


class InProcessClient:
    """`EngineClient` over a service object: the same objects, without JSON."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.count = service.count
        self.health = service.health
        self.figures = service.figures
        self.metrics = service.metrics
        self.cache_report = service.cache_report
        self.cache_clear = service.cache_clear
        self.close = service.close

    def submit(self, request: ModelRequest) -> Generation:
        queue = EventQueue()
        accepted = self._service.submit(request, queue)
        return Generation(accepted, queue, partial(self._service.cancel, accepted.id))
