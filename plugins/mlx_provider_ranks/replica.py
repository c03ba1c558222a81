"""One engine on several ranks: rank 0 decides, the others execute its decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from mlx_provider.records import Features, LoadedModel
from mlx_provider.replicas import Fault
from mlx_provider.replicas.engine import Decision, Drawn, Outcome, Replica, Scheduler, StepRecord

from .encoding import KINDS, Codec, decode_outcome, encode_outcome

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
    def embed(
        self, model: LoadedModel, own: Callable[[], Sequence[Features]]
    ) -> Sequence[Features]: ...
    def failed(self, fault: Fault) -> None: ...


class RankReplica(Replica):
    """A replica of an engine. It is the same on every rank."""

    alone = False

    def __init__(self, side: Side, scheduler: Scheduler) -> None:
        self._side = side
        self._codec = Codec(scheduler)

    def note(self, decision: Decision) -> None:
        encode = partial(self._codec.encode_decision, decision)
        self._side.announce(KINDS[type(decision)], encode)

    def record(self, own: Callable[[], StepRecord]) -> StepRecord:
        return self._side.decide(
            "record", own, self._codec.encode_record, self._codec.decode_record
        )

    def outcomes(self, own: Callable[[], Sequence[Outcome]]) -> Sequence[Outcome]:
        return self._side.decide("outcomes", own, _encoded, _decoded)

    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn:
        return self._side.draw(logits, own)

    def embed(
        self, model: LoadedModel, own: Callable[[], Sequence[Features]]
    ) -> Sequence[Features]:
        return self._side.embed(model, own)

    def failed(self, fault: Fault) -> None:
        self._side.failed(fault)


def _encoded(outcomes: Sequence[Outcome]) -> Any:
    return [encode_outcome(each) for each in outcomes]


def _decoded(encoded: Any) -> Sequence[Outcome]:
    return [decode_outcome(each) for each in encoded]
