"""Whether an engine decides for itself, or repeats what another process has decided.

A model may run in several processes, each with its own share of it. They run the same engine code
on the same requests. What is not the same everywhere by itself (times, free memory, grammars,
texts, drafts, drawn tokens) is decided by one of them. An engine alone decides all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from ..isolation import Fault
from ..protocol.events import FinishReason
from ..records import Features, LoadedModel
from .execution.decode_batch import Drafts
from .execution.sampler import Drawn
from .request import PrefillJob, Request, Row
from .scheduling.plan import StepPlan
from .scheduling.scheduler import Scheduler

T = TypeVar("T")


class Decisions:
    """What one engine does not compute on the device, and what it draws and embeds.

    Every method belongs to the engine thread. `own` decides in this process; a subclass may give
    what another process has decided.
    """

    def submitted(self, request: Request) -> None:
        """A request is queued."""

    def ended(self, request: Request) -> None:
        """A request is ended from outside the step, or by a failure."""

    def step(self) -> None:
        """A step begins."""

    def overflowing(self, own: Callable[[], tuple[Row, bool] | None]) -> tuple[Row, bool] | None:
        """A row that has outgrown the memory, and whether it can go on later."""
        return own()

    def admitted(self, own: Callable[[], PrefillJob | None]) -> PrefillJob | None:
        """The prompt that is let in."""
        return own()

    def plan(
        self, own: Callable[[], tuple[StepPlan, Mapping[Row, int]]]
    ) -> tuple[StepPlan, Mapping[Row, int]]:
        """What a step runs, and the number of drafts that are wanted for each row."""
        return own()

    def drafts(self, own: Callable[[], Drafts]) -> Drafts:
        """Tokens that may follow."""
        return own()

    def reasons(
        self, own: Callable[[], Sequence[FinishReason | None]]
    ) -> Sequence[FinishReason | None]:
        """Why each of some rows ends with its token, or `None`."""
        return own()

    def last_reason(self, own: Callable[[], FinishReason | None]) -> FinishReason | None:
        """Why a row ends; `None`: its request has failed."""
        return own()

    def masks(self, own: Callable[[], list[Any]], without: list[Any]) -> list[Any]:
        """Grammar masks; `without`: where another process applies them."""
        return own()

    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn:
        """Tokens (B,) drawn from logits (B, vocab)."""
        return own()

    def was_drawn(self, own: bool) -> bool:
        """Whether the last draw has not failed."""
        return own

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

    def engine(self, name: str, scheduler: Scheduler) -> Decisions:
        """Of one engine: a process may have several."""

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

    def engine(self, name: str, scheduler: Scheduler) -> Decisions:
        return Decisions()

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
