"""What the server knows of the ranks behind its service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import MLXProviderError
from ..protocol.health import RankStatus


@dataclass(eq=False)
class RankGroup:
    """One group, for as long as it lives. Any thread."""

    last_fault: RankStatus | None = None
    """Why the group before this one ended."""
    statuses: Callable[[], list[RankStatus]] = list
    """Of every rank; set once they have met."""
    serving: Callable[[], None] = lambda: None
    """Called once requests are answered."""
    refused: Callable[[MLXProviderError], None] = lambda error: None
    """Called with the error with which the start failed."""
    error: MLXProviderError | None = None
    """With which the group has ended, if it has."""
    _on_loss: Callable[[], object] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lose(self, error: MLXProviderError) -> None:
        """A rank is lost: every request is told, then the process ends. The first error counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error, call = error, self._on_loss
        call()

    def on_loss(self, call: Callable[[], object]) -> None:
        """Have `call` run once a rank is lost; at once where one is."""
        with self._lock:
            self._on_loss, lost = call, self.error is not None
        if lost:
            call()
