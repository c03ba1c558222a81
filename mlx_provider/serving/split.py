"""The ranks that a model of this process is split over, as far as serving needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..engine.replication import ONE_PROCESS, Replication
from ..errors import LoadFailed, wrong_option
from ..isolation import Isolation
from ..protocol.options import ModelOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """All ranks. A process that does not share its models has only itself."""

    replication: Replication = ONE_PROCESS
    group: Any = None
    """`mlx.core.distributed.Group`"""
    memory_limit: int | None = None
    """Bytes for models and rows on the rank that has the fewest."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else int(self.group.size())

    def share(self, nbytes: int) -> int:
        """The share of one rank in bytes that are split over the ranks."""
        return -(-nbytes // self.size)

    def check(self, options: ModelOptions) -> None:
        """Raises `BadRequest` for options that need a whole model."""
        if self.size == 1:
            return
        for name, wanted in (
            ("reproducible", options.reproducible),
            ("sparse_prefill", options.sparse_prefill is not None),
            ("adapter", options.adapter is not None),
        ):
            if wanted:
                raise wrong_option(
                    name, f"not for a model that is split over {self.size} ranks: leave it out"
                )

    def alone(self, make: Callable[[], T], without: T) -> T:
        """A result that rank 0 computes alone. `without`: the value on the other ranks (engine
        thread).

        Raises the errors of `make` on rank 0 on every rank.
        """
        with Isolation() as making:
            made = without if self.replication.follows else make()
        fault = making.fault
        problem = self.replication.decide("made", lambda: fault.summary if fault else "", str, str)
        if fault is not None:
            raise fault.error
        if problem:
            raise LoadFailed(f"rank 0 failed: {problem}")
        return made

    def loaded(self, folder: Path, made: object) -> None:
        """Check that every rank has the same weights, or has loaded its share (engine thread, every
        rank). One process has nothing to compare.

        `made`: the model, `None` before it is loaded, or the error of its load. Raises `LoadFailed`
        that names the ranks at fault.
        """


WHOLE = Ranks()
