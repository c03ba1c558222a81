"""The processes that share the models of this one, as far as serving needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..engine.replication import ONE_PROCESS, Replication
from ..protocol.options import ModelOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """All of them. A process that does not share its models has only itself."""

    replication: Replication = ONE_PROCESS
    group: Any = None
    """`mlx.core.distributed.Group`"""
    memory_limit: int | None = None
    """Bytes for models and rows in the process that has the fewest."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else int(self.group.size())

    def share(self, nbytes: int) -> int:
        """The share of one process in bytes that are split over all."""
        return -(-nbytes // self.size)

    def check(self, options: ModelOptions) -> None:
        """Raises `BadRequest` for options that need a whole model."""

    def alone(self, make: Callable[[], T], without: T) -> T:
        """A result that only the leader computes (engine thread). `without`: the value in the other
        processes.

        What `make` raises in the leader is raised in every process.
        """
        return make()

    def loaded(self, folder: Path, made: object) -> None:
        """Check that every process has the same weights, or has loaded its share (engine thread,
        every process). One process has nothing to compare.

        `made`: the model, `None` before it is loaded, or the error of its load. Raises `LoadFailed`
        that names the processes at fault.
        """


WHOLE = Processes()
