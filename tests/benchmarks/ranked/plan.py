"""What `bench ranks` measures, and how large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_provider.errors import BadRequest


@dataclass(frozen=True)
class Plan:
    ranks: Sequence[int] = (1, 2)
    """Processes that share the model; 1: nobody else."""
    streams: Sequence[int] = (1, 4)
    """Requests at once."""
    format: str = "float32"
    tokens: int = 32
    """Of each answer."""
    rounds: int = 2
    """Of each number of streams; the fastest step counts."""
    hidden: int = 256
    layers: int = 4
    peers: bool = True
    """Beside mlx-lm's server."""

    def check(self) -> None:
        """Raises `BadRequest`."""
        heads = max(2, self.hidden // 32) // 2
        for ranks in self.ranks:
            if heads % ranks:
                raise BadRequest(
                    f"{ranks} ranks cannot share {heads} key and value heads: a hidden size of "
                    f"{64 * ranks} has enough",
                    param="ranks",
                )
        for streams in self.streams:
            if streams > 32:
                raise BadRequest(
                    "mlx_lm.server decodes 32 rows at once: no more streams", param="streams"
                )
