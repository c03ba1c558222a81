"""Compares what the ranks load: the same folder on each, and a share on each in the end."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from mlx_provider.errors import LoadFailed, MLXProviderError, wrong_option
from mlx_provider.replicas import Isolation
from mlx_provider.replicas.engine import ModelOptions, Processes

T = TypeVar("T")

SAMPLES = 16
"""Places of a weight file whose bytes are compared."""
SAMPLE = 4096
"""Bytes at each place."""
HEARD_SECONDS = 3.5
"""Seconds in which the ranks learn of a rank that could not load its share."""
FAILED = 0
"""Sent instead of a digest's first word by a rank that could not load its share."""


@dataclass(frozen=True)
class LoadingRanks(Processes):
    """Ranks of a group that load each model together."""

    stuck: Callable[[str], None] = lambda reason: None
    """Ends the group: this rank could not load its share, and the others cannot receive this,
    because they are in passes of their load."""
    wait_heard: Callable[[], None] = lambda: None
    """Waits on rank 0 until the other ranks have received all messages."""

    def check(self, options: ModelOptions) -> None:
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
        """The words of every rank, in order."""
        own = mx.array([words], mx.int32)
        found: list[list[int]] = mx.distributed.all_gather(own, group=self.group).tolist()  # type: ignore[assignment]
        return found

    def _told_of_failure(self, folder: Path, error: MLXProviderError) -> list[list[int]]:
        """Like `_gathered` if every rank has failed; otherwise the group ends."""
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
        """Check that rank 0 is before or at the end of its load. Collectives of a rank that still
        loads would be mixed up with those that follow here."""
        self.replication.decide("compared", lambda: 0, int, int)


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _words(folder: Path) -> list[int]:
    """A digest of a folder's model, as four positive words."""
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
