"""The server's view of the processes that share its models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import MLXProviderError
from ..protocol.health import ProcessStatus


@dataclass(eq=False)
class ProcessGroup:
    """One group during its life. Safe from any thread."""

    last_fault: ProcessStatus | None = None
    """Why the previous group ended."""
    statuses: Callable[[], list[ProcessStatus]] = list
    """Returns the status of every process. Set once they have met."""
    serving: Callable[[], None] = lambda: None
    """Called once requests are answered."""
    refused: Callable[[MLXProviderError], None] = lambda error: None
    """Called with the error of a failed start."""
    error: MLXProviderError | None = None
    """The error that ended the group, if it has ended."""
    _on_loss: Callable[[], object] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lose(self, error: MLXProviderError) -> None:
        """A process is lost: every request gets the error, then this process ends. Only the first
        error counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error, call = error, self._on_loss
        call()

    def on_loss(self, call: Callable[[], object]) -> None:
        """Run `call` once a process is lost; at once if one is already lost."""
        with self._lock:
            self._on_loss, lost = call, self.error is not None
        if lost:
            call()
