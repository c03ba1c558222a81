"""A client whose engine is a service of the same process."""

from functools import partial

from mlx_provider.client.generation import Generation
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.requests import ModelRequest
from mlx_provider.serving.service import ChatService


class InProcessClient:
    def __init__(self, service: ChatService) -> None:
        self.service = service
        self.count = service.count
        self.health = service.health
        self.stats = service.stats
        self.metrics = service.metrics
        self.close = service.close

    def cache_report(self) -> dict[str, object]:
        return self.service.prefixes.report()

    def cache_clear(self) -> None:
        self.service.prefixes.clear()

    def submit(self, request: ModelRequest) -> Generation:
        queue = EventQueue()
        accepted = self.service.submit(request, queue)
        return Generation(accepted, queue, partial(self.service.cancel, accepted.id))
