"""The decisions of one engine that runs on several ranks: rank 0 makes and sends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from ..engine.execution.decode_batch import Drafts
from ..engine.execution.sampler import Drawn
from ..engine.replication import Decisions
from ..engine.request import PrefillJob, Request, Row
from ..engine.scheduling.plan import StepPlan
from ..engine.scheduling.scheduler import Scheduler
from ..isolation import Fault
from ..protocol.events import FinishReason
from ..records import Features, LoadedModel
from .encoding import Codec, encode_request

T = TypeVar("T")


class Side(Protocol):
    """This rank's side of the channel and of the collectives, for one engine."""

    def decide(
        self,
        kind: str,
        own: Callable[[], T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
    ) -> T: ...
    def announce(self, kind: str, encode: Callable[[], dict[str, Any]]) -> None: ...
    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn: ...
    def embed(self, model: LoadedModel, own: Callable[[], Features]) -> Features: ...
    def pass_failed(self, fault: Fault) -> None: ...


class RankDecisions(Decisions):
    """What rank 0 decides, on every rank."""

    def __init__(self, side: Side, scheduler: Scheduler) -> None:
        self._side = side
        self._scheduler = scheduler
        self._codec = Codec(scheduler)

    def submitted(self, request: Request) -> None:
        self._side.announce("submit", partial(encode_request, request))

    def ended(self, request: Request) -> None:
        self._side.announce("ended", lambda: {"id": request.id})

    def step(self) -> None:
        self._side.announce("step", dict)

    def overflowing(self, own: Callable[[], tuple[Row, bool] | None]) -> tuple[Row, bool] | None:
        codec = self._codec
        return self._side.decide("overflowing", own, codec.encode_overflow, codec.decode_overflow)

    def admitted(self, own: Callable[[], PrefillJob | None]) -> PrefillJob | None:
        return self._side.decide("admitted", own, self._codec.encode_job, self._let_in)

    def plan(
        self, own: Callable[[], tuple[StepPlan, Mapping[Row, int]]]
    ) -> tuple[StepPlan, Mapping[Row, int]]:
        codec = self._codec
        return self._side.decide("plan", own, codec.encode_plan, codec.decode_plan)

    def drafts(self, own: Callable[[], Drafts]) -> Drafts:
        codec = self._codec
        return self._side.decide("drafts", own, codec.encode_drafts, codec.decode_drafts)

    def reasons(
        self, own: Callable[[], Sequence[FinishReason | None]]
    ) -> Sequence[FinishReason | None]:
        return self._side.decide("reasons", own, _same, _same)

    def last_reason(self, own: Callable[[], FinishReason | None]) -> FinishReason | None:
        return self._side.decide("last reason", own, _same, _same)

    def masks(self, own: Callable[[], list[Any]], without: list[Any]) -> list[Any]:
        return self._side.decide("masks", own, lambda _: None, lambda _: without)

    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn:
        return self._side.draw(logits, own)

    def was_drawn(self, own: bool) -> bool:
        return self._side.decide("drawn", lambda: own, bool, bool)

    def embed(self, model: LoadedModel, own: Callable[[], Features]) -> Features:
        return self._side.embed(model, own)

    def pass_failed(self, fault: Fault) -> None:
        self._side.pass_failed(fault)

    def _let_in(self, encoded: Any) -> PrefillJob | None:
        return self._scheduler.let_in(self._codec.decode_job(encoded))


def _same(value: T) -> T:
    return value
