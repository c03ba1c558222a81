"""Decides for an engine itself, or repeats the decisions of another process.

A model may run in several processes, each with its own part. They run the same engine code on the
same requests. One process decides everything that can differ between them: times, free memory,
grammars, texts, drafts, drawn tokens. A single engine decides all of it.
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
    """The decisions, draws and embeddings of one engine.

    Every method belongs to the engine thread. `own` decides in this process. A subclass may return
    the decision of another process.
    """

    alone = True
    """Whether no other process runs the same passes."""

    def note(self, decision: Decision) -> None:
        """Report the decision that the engine applies next."""

    def record(self, own: Callable[[], StepRecord]) -> StepRecord:
        """The record of the next step. Decisions that `own` makes are reported with `note`."""
        return own()

    def outcomes(self, own: Callable[[], Sequence[Outcome]]) -> Sequence[Outcome]:
        """The outcomes of tokens that were read, one per token."""
        return own()

    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn:
        """Tokens (B,) drawn from logits (B, vocab). Raises the errors of `own`."""
        return own()

    def embed(
        self, model: LoadedModel, own: Callable[[], Sequence[Features]]
    ) -> Sequence[Features]:
        """Features of the media items that a slice of the vision tower completes. Raises the errors
        of `own`."""
        return own()

    def failed(self, fault: Fault) -> None:
        """A pass, or other work on caches, has failed in this process. Raises if other processes
        do the same work."""


class Replication(Protocol):
    """The replication of a whole process while it loads models. Encoded values must be valid
    JSON."""

    @property
    def follows(self) -> bool:
        """Whether this process repeats the decisions of another process."""

    def engine(self, name: str, scheduler: Scheduler) -> Replica:
        """The replica of one engine. A process may have several engines."""

    def reading(self, name: str, own: Callable[[], int]) -> Callable[[], int]:
        """A number that one process reads when an engine decides, with the same value in all
        processes."""

    def decide(
        self,
        kind: str,
        own: Callable[[], T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
    ) -> T:
        """A decision of this kind: the result of `own`, or that of another process.

        Raises `ProcessLost` if the processes are not at the same point.
        """

    def announce(self, kind: str, encode: Callable[[], dict[str, Any]]) -> None:
        """Report an event that other processes apply before their next decision."""

    def gather(self, own: Any) -> list[Any]:
        """The values of all processes, in their order. All processes must call it at the same
        point."""

    def failed(self, fault: Fault) -> None:
        """Work that all processes do has failed in this one. Raises if there are others."""


class OneProcess:
    """The replication of a process that shares its models with no other process."""

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

    def failed(self, fault: Fault) -> None:
        """No other process has done more."""


ONE_PROCESS = OneProcess()
