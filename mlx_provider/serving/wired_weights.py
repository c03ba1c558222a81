"""Keeps weights resident on Metal.

macOS may move GPU buffers out of memory, and back before each pass. MLX 0.32.4 keeps buffers
resident up to `set_wired_limit` (backend/metal/resident.cpp), by default 0. Published gains of
another server: 31 % for prompts on an M3 Ultra. The limit is exactly the weights' bytes: wired
temporary buffers have caused panics of Macs (mlx #3186)."""

from __future__ import annotations

import logging

import mlx.core as mx

log = logging.getLogger(__name__)

SHARE = 0.65
"""Largest wired share of the machine's memory."""
LEFT = 8 * 2**30
"""Bytes."""


class WiredWeights:
    """Every method belongs to the engine thread. No effect without Metal."""

    def __init__(self, *, on: bool = True) -> None:
        self._most = _most() if on and mx.metal.is_available() else 0
        self._bytes: dict[int, int] = {}
        """Bytes by number of the model."""

    def loaded(self, number: int, nbytes: int) -> None:
        """Called after the weights were evaluated."""
        if self._most:
            mx.clear_cache()  # free buffers of the load would count
            self._bytes[number] = nbytes
            self._set()

    def leaving(self, number: int) -> None:
        """Idempotent."""
        if self._bytes.pop(number, None) is not None:
            self._set()

    def forget(self) -> None:
        """Called after the death of the engine thread. Safe from any thread."""
        self._bytes.clear()

    def _set(self) -> None:
        limit = min(sum(self._bytes.values()), self._most)
        mx.set_wired_limit(limit)
        log.info("%d bytes of weights are wired", limit)


def _most() -> int:
    info = mx.device_info()
    memory, recommended = (
        int(info.get(name, 0)) for name in ("memory_size", "max_recommended_working_set_size")
    )
    return max(0, min(int(SHARE * memory), memory - LEFT, recommended))
