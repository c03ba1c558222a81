"""The two sides of a decision: rank 0 sends it, the others receive it.

Decisions are messages on the control channel, in one order for all engines of the process; arrays
are sent by collectives of the ranks that share the model. Both sides build the same graphs, so
collectives have the same order. A value of rank 0 alone is added to zeros of the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from mlx_provider.errors import MLXProviderError, ProcessLost, RequestFailed
from mlx_provider.records import Features, LoadedModel, SpreadsFeatures
from mlx_provider.replicas import Fault, Isolation
from mlx_provider.replicas.engine import Drawn, Scheduler, Types, leaves, outline, rebuilt

from .gathering import gathered
from .replica import RankReplica

log = logging.getLogger(__name__)

T = TypeVar("T")
Message = Mapping[str, Any]
OPENING = frozenset({"cut", "preempted", "admitted", "caught up"})
"""Kinds that open a step: they go out with its record, before which nothing is launched."""
READ = OPENING | {"record", "ended"}
"""Kinds that bring readings."""


class Readings:
    """Numbers that rank 0 reads when its engines decide, by name."""

    def __init__(self) -> None:
        self._own: dict[str, Callable[[], int]] = {}
        self.values: dict[str, int] = {}

    def of(self, name: str, own: Callable[[], int]) -> Callable[[], int]:
        """A function that returns the last reading; 0 before the first."""
        self._own[name] = own
        return lambda: self.values.get(name, 0)

    def taken(self) -> dict[str, int]:
        self.values = {name: own() for name, own in self._own.items()}
        return self.values


class Tells(Protocol):
    """The connection of rank 0 to the others."""

    def tell(self, message: Message, *, more: bool = False) -> None:
        """Send it to every other rank. `more`: with the next one. Raises `ProcessLost`."""

    def send(self) -> None:
        """Send all messages, because a wait for the others follows. Raises `ProcessLost`."""


class Leading:
    """Rank 0's side for one engine."""

    follows = False

    def __init__(
        self,
        channel: Tells,
        group: mx.distributed.Group,
        engine: str = "",
        readings: Readings | None = None,
    ) -> None:
        self._channel = channel
        self._group = group
        self._engine = engine
        self._readings = readings or Readings()
        self._opening = False
        """Tokens are read before the record of the step is made."""

    def engine(self, name: str, scheduler: Scheduler) -> RankReplica:
        side = Leading(self._channel, self._group, name, self._readings)
        return RankReplica(side, scheduler)

    def reading(self, name: str, own: Callable[[], int]) -> Callable[[], int]:
        return self._readings.of(name, own)

    def decide(
        self,
        kind: str,
        own: Callable[[], T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
    ) -> T:
        made = own()
        self._send(kind, {"value": encode(made)})
        return made

    def announce(self, kind: str, encode: Callable[[], dict[str, Any]]) -> None:
        self._send(kind, encode())

    def gather(self, own: Any) -> list[Any]:
        self._channel.send()
        return gathered(own, self._group)

    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn:
        try:
            drawn = own()
        except BaseException:
            mx.eval(_added(_none_drawn(logits), self._group))  # the others wait for tokens
            raise  # unchanged: an `MLXProviderError` would count as an error of all ranks
        return Drawn(_added(drawn.tokens, self._group), drawn.logprobs)

    def embed(
        self, model: LoadedModel, own: Callable[[], Sequence[Features]]
    ) -> Sequence[Features]:
        with Isolation() as trying:
            made = list(own())
            found = leaves(made)
            mx.eval(found)
            tree = outline(made, _types(model))
        if trying.fault is not None:
            error = _error(trying.fault)
            self._send("features", {"value": {"failed": error.message}})
            raise error
        arrays = [[list(each.shape), _name(each.dtype)] for each in found]
        self._send("features", {"value": {"arrays": arrays, "outline": tree}})
        mx.eval([_added(each, self._group) for each in found])
        return made

    def failed(self, fault: Fault) -> None:
        _refuse(fault, "rank 0")

    def _send(self, kind: str, more: Mapping[str, Any]) -> None:
        message = {"kind": kind, "engine": self._engine, **more}
        if kind in READ:
            message["readings"] = self._readings.taken()
        if kind in ("caught up", "record"):
            self._opening = kind != "record"
        self._channel.tell(message, more=kind in OPENING or self._opening)


class Hears(Protocol):
    """The channel of a follower, and its actions between decisions."""

    readings: Mapping[str, int]
    """The last received readings of rank 0."""

    def next(self, kind: str, engine: str) -> Any:
        """The value of the next decision. Raises `ProcessLost` if it is of another kind."""


class Following:
    """The side of another rank for one engine."""

    follows = True

    def __init__(self, ears: Hears, group: mx.distributed.Group, engine: str = "") -> None:
        self._ears = ears
        self._group = group
        self._engine = engine

    def engine(self, name: str, scheduler: Scheduler) -> RankReplica:
        return RankReplica(Following(self._ears, self._group, name), scheduler)

    def reading(self, name: str, own: Callable[[], int]) -> Callable[[], int]:
        return lambda: self._ears.readings.get(name, 0)

    def decide(
        self,
        kind: str,
        own: Callable[[], T],
        encode: Callable[[T], Any],
        decode: Callable[[Any], T],
    ) -> T:
        return decode(self._ears.next(kind, self._engine))

    def announce(self, kind: str, encode: Callable[[], dict[str, Any]]) -> None:
        """Does nothing: rank 0 announces."""

    def gather(self, own: Any) -> list[Any]:
        return gathered(own, self._group)

    def draw(self, logits: mx.array, own: Callable[[], Drawn]) -> Drawn:
        return Drawn(_added(_none_drawn(logits), self._group), None)

    def embed(
        self, model: LoadedModel, own: Callable[[], Sequence[Features]]
    ) -> Sequence[Features]:
        value = self._ears.next("features", self._engine)
        if "outline" not in value:
            raise RequestFailed(f"its image failed on rank 0: {value['failed']}")
        blank = [mx.zeros(shape, getattr(mx, dtype)) for shape, dtype in value["arrays"]]
        found = [_added(each, self._group) for each in blank]
        mx.eval(found)
        made: list[Features] = rebuilt(value["outline"], found, _types(model))
        return made

    def failed(self, fault: Fault) -> None:
        _refuse(fault, "this rank")


def _refuse(fault: Fault, where: str) -> None:
    """The other ranks wait in the pass that has failed on this rank."""
    if not fault.ours:
        log.error("a pass failed\n%s", fault.trace)
        raise ProcessLost(f"a pass failed on {where}: {fault.summary}")


def _none_drawn(logits: mx.array) -> mx.array:
    """Zeros (B,) int32 that depend on the collectives of the pass."""
    zeros = mx.zeros(logits.shape[0], mx.int32)
    after: list[mx.array] = mx.depends([zeros], [logits])
    return after[0]


def _added(array: mx.array, group: mx.distributed.Group) -> mx.array:
    """The sum over all ranks. Only one rank has values other than zero."""
    return mx.distributed.all_sum(array, group=group)


def _types(model: LoadedModel) -> Types:
    return model.feature_types if isinstance(model, SpreadsFeatures) else ()


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _error(fault: Fault | None) -> MLXProviderError:
    if fault is None:
        return ProcessLost("rank 0 could not go on")
    if isinstance(fault.error, MLXProviderError):
        return fault.error
    return fault.of_plugin() or RequestFailed(fault.summary)
