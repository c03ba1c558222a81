"""The ranks that a model of this process is split over, as far as serving has to know."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from ..engine.replication import ONE_PROCESS, Replication
from ..errors import LoadFailed, MLXProviderError, wrong_option
from ..isolation import Isolation
from ..protocol.options import ModelOptions

T = TypeVar("T")

SAMPLES = 16
"""Places of a weight file whose bytes are compared,"""
SAMPLE = 4096
"""and bytes of each."""
HEARD_SECONDS = 3.5
"""Seconds in which the ranks hear of one that could not load its share."""
FAILED = 0
"""Told in place of a digest's first word by a rank that could not load its share."""


@dataclass(frozen=True)
class Ranks:
    """All ranks; of a process that has its models to itself, it alone."""

    replication: Replication = ONE_PROCESS
    group: Any = None
    """`mlx.core.distributed.Group`"""
    stuck: Callable[[str], None] = lambda reason: None
    """Ends the group: this rank could not load its share, and the others do not hear of it, as they
    are in passes of their load."""
    wait_heard: Callable[[], None] = lambda: None
    """Until the other ranks have heard all that was told; on rank 0."""
    memory_limit: int | None = None
    """Bytes for models and rows of the rank that has the fewest."""

    @property
    def size(self) -> int:
        return 1 if self.group is None else int(self.group.size())

    def share(self, nbytes: int) -> int:
        """Of bytes that are split over the ranks, those of one."""
        return -(-nbytes // self.size)

    def check(self, options: ModelOptions) -> None:
        """Raises `BadRequest` for what takes all of a model."""
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
        """What rank 0 makes of its own; `without`: what others go on with (engine thread).

        Raises on every rank what `make` raises on rank 0.
        """
        with Isolation() as making:
            made = without if self.replication.follows else make()
        fault = making.fault
        problem = self.replication.decide("made", lambda: fault.summary if fault else "", str, str)
        if fault is not None:
            raise fault.error
        if problem:
            raise LoadFailed(f"rank 0 could not go on: {problem}")
        return made

    def loaded(self, folder: Path, made: object) -> None:
        """Every rank has the same weights, or has loaded its share (engine thread, every rank).

        `made`: the model, `None` before it is loaded, or why there is none.
        Raises `LoadFailed` that names the ranks which have not.
        """
        if self.group is None:
            return
        if isinstance(made, MLXProviderError):
            found = self._told_of_failure(folder, made)
        else:
            self._here()
            found = self._gathered(_words(folder))
        broken = [rank for rank, words in enumerate(found) if words[0] == FAILED]
        if broken:
            raise LoadFailed(
                f"{folder.name} could not be loaded by {_named(broken)}, whose log says why"
            )
        unlike = [rank for rank, words in enumerate(found) if words != found[0]]
        if unlike:
            raise LoadFailed(
                f"{folder.name} has other weights or another config on {_named(unlike)} than on "
                "rank 0: copy the same folder to every machine"
            )

    def _gathered(self, words: list[int]) -> list[list[int]]:
        """Of every rank, in order."""
        own = mx.array([words], mx.int32)
        found: list[list[int]] = mx.distributed.all_gather(own, group=self.group).tolist()  # type: ignore[assignment]
        return found

    def _told_of_failure(self, folder: Path, error: MLXProviderError) -> list[list[int]]:
        """As `_gathered`, where every rank has failed; else the group ends."""
        reason = f"{folder.name} could not be loaded: {error.message}"
        timer = threading.Timer(HEARD_SECONDS, self.stuck, (reason,))
        timer.start()
        try:
            self._here()
            self.wait_heard()
            return self._gathered([FAILED] * 4)
        finally:
            timer.cancel()

    def _here(self) -> None:
        """Rank 0 is at the end of its load, or before it. Collectives of a rank that still loads
        would be taken for those that follow here."""
        self.replication.decide("compared", lambda: 0, int, int)


WHOLE = Ranks()


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _words(folder: Path) -> list[int]:
    """A digest of what a folder's model is, as four positive words."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            for at in range(SAMPLES):
                opened.seek(at * max(0, size - SAMPLE) // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE))
    data = digest.digest()
    return [1 + int.from_bytes(data[i : i + 4], "big") % (2**31 - 2) for i in range(0, 16, 4)]
