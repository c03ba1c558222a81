"""Counts how often the host reads arrays, and whether the device has other work meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import mlx.core as mx

from mlx_provider.engine.engine import Engine
from replaced import Replaced, wrap

READS = ((mx.array, "tolist"), (mx.array, "item"), (mx, "eval"), (mx, "synchronize"))


class DeviceReads(ExitStack):
    """While entered, watches the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.passes = 0
        self.ahead = 0
        """Passes that followed unread results."""
        self.idle = 0
        """Reads of tokens while the device had no pass to run behind those that drew them."""
        self.others = 0
        """Reads of anything else."""
        self._engine = engine
        self._queued = 0
        """Passes behind the one whose tokens were drawn last."""
        self._reading = False

    def __enter__(self) -> DeviceReads:
        patch = self.enter_context(Replaced())
        batch: Any = self._engine.batch
        wrap(patch, batch, "forward", self._launched)
        wrap(patch, batch, "drawn", self._drew)
        wrap(patch, batch, "_read", self._reads)
        for owner, name in READS:
            wrap(patch, owner, name, self._counted)
        return self

    def _launched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            self.passes += 1
            self.ahead += bool(args[2])
            self._queued += 1
            return forward(*args)

        return launch

    def _drew(self, drawn: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any) -> Any:
            self._queued = 0
            return drawn(*args)

        return draw

    def _reads(self, read: Callable[[], Any]) -> Callable[[], Any]:
        def reads() -> Any:
            self.idle += not self._queued
            self._reading = True
            try:
                return read()
            finally:
                self._reading = False

        return reads

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.others += not self._reading
            return original(*args, **kwargs)

        return counted
