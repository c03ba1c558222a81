"""Whether an engine decides for itself, or acts on what another process has decided.

A model may run in several processes, each with its own share of it. They run the same engine code
on the same requests. What is not the same everywhere by itself (times, free memory, grammars,
texts, drafts, drawn tokens) is decided by one of them. An engine alone decides all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from ..isolation import Fault
from ..records import Features, LoadedModel
from .execution.sampler import Drawn
from .scheduling.scheduler import Scheduler
from .step.decisions import Decision, Outcome
from .step.record import StepRecord

T = TypeVar("T")


class Replica:
    """One engine's part in that: what it decides, draws and embeds.

    Every method belongs to the engine thread. `own` decides in this process; a subclass may give
    what another process has decided.
    """

    def note(self, decision: Decision) -> None:
        """The engine acts on this next."""

    def record(self, own: Callable[[], StepRecord]) -> StepRecord:
        """What the next step runs. What `own` decides on the way is noted."""
        return own()

    def outcomes(self, own: Callable[[], Sequence[Outcome]]) -> Sequence[Outcome]:
        """Of tokens that were read, one by one."""
        return own()

    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn:
        """Tokens (B,) drawn from logits (B, vocab). Raises what `own` raises."""
        return own()

    def embed(self, model: LoadedModel, own: Callable[[], Features]) -> Features:
        """Features of one media item. Raises what `own` raises."""
        return own()

    def pass_failed(self, fault: Fault) -> None:
        """A pass failed here. Raises where other processes wait in theirs."""


class Replication(Protocol):
    """The same of a whole process, while it loads models. Encoded values can be written as JSON."""

    @property
    def follows(self) -> bool:
        """Whether this process repeats what another one decides."""

    def engine(self, name: str, scheduler: Scheduler) -> Replica:
        """Of one engine: a process may have several."""

    def reading(self, name: str, own: Callable[[], int]) -> Callable[[], int]:
        """A number that is read in one process, as an engine decides, and is the same in all."""

    def decide(
        self,
        kind: str,
        own: Callable[[], T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
    ) -> T:
        """A decision of this kind: `own`, or what was decided elsewhere.

        Raises `RankLost` where the processes are not at the same place.
        """

    def announce(self, kind: str, encode: Callable[[], dict[str, Any]]) -> None:
        """Something has happened that other processes take notice of before they next decide."""

    def gather(self, own: Any) -> list[Any]:
        """What each process has of its own, in their order. All of them ask at the same place."""


class OneProcess:
    """The replication of a process that has its models to itself."""

    follows = False

    def engine(self, name: str, scheduler: Scheduler) -> Replica:
        return Replica()

    def reading(self, name: str, own: Callable[[], int]) -> Callable[[], int]:
        return own

    def decide(
        self,
        kind: str,
        own: Callable[[], T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
    ) -> T:
        return own()

    def announce(self, kind: str, encode: Callable[[], dict[str, Any]]) -> None:
        """No other process listens."""

    def gather(self, own: Any) -> list[Any]:
        return [own]


ONE_PROCESS = OneProcess()
