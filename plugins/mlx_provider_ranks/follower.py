"""A follower: it runs copies of rank 0's engines on the received decisions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import mlx.core as mx

from mlx_provider.errors import MLXProviderError, ProcessLost
from mlx_provider.replicas import EngineSettings, PluginRegistry
from mlx_provider.replicas.engine import (
    CLEAR_EVERY,
    Engine,
    EngineWorker,
    ModelCache,
    ModelOptions,
    Phase,
    Recorder,
    Request,
    Weights,
    engine_name,
)

from .encoding import Codec, decode_request
from .loading import LoadingRanks
from .sides import Following

log = logging.getLogger(__name__)

MEANWHILE = ("ended", "evict", "clear", "unload")
"""What may happen between two decisions of a step."""

Message = Mapping[str, Any]


def follow(
    settings: EngineSettings, registry: PluginRegistry, group: mx.distributed.Group, ears: Ears
) -> None:
    """Run this rank of a group until rank 0 ends; see `Follower.run`."""
    Follower(settings, registry, ears, group).run()


class Ears(Protocol):
    """The connection to rank 0."""

    def hear(self) -> dict[str, Any]:
        """The next message. Raises `ProcessLost` when rank 0 is lost."""

    def failed(self, reason: str) -> None:
        """Send rank 0 the reason for a failure of this rank."""


class Follower:
    """Not thread-safe."""

    def __init__(
        self,
        settings: EngineSettings,
        registry: PluginRegistry,
        ears: Ears,
        group: mx.distributed.Group,
    ) -> None:
        self._ears = ears
        self._models = ModelCache(
            settings,
            registry,
            EngineWorker(lambda posts: None, lambda error: None),  # its thread never starts
            Recorder(),
            processes=LoadingRanks(Following(self, group), group, stuck=ears.failed),
        )
        self._loaded: dict[int, Weights] = {}
        self._engines: dict[str, Engine] = {}
        self._requests: dict[str, Request] = {}
        self._record: Message | None = None
        """Of the step that begins."""
        self._steps = 0
        self.readings: Mapping[str, int] = {}
        self._happens: Mapping[str, Callable[[Message], None]] = {
            "load": self._load,
            "start": self._start,
            "unload": self._unload,
            "submit": self._submit,
            "ended": self._ended,
            **dict.fromkeys(("preempted", "cut", "admitted", "caught up"), self._act),
            "record": self._step,
            "evict": lambda told: self._models.prefixes.evict_to(told["to"], told["claimed"]),
            "trim": lambda told: self._models.prefixes.trim(told["buffers"], told["to"]),
            "clear": lambda message: self._models.prefixes.clear_here(),
        }

    def run(self) -> None:
        """Follow until rank 0 ends.

        Raises `ProcessLost` if it is lost, and the errors of passes.
        """
        while (message := self._hear())["kind"] != "end":
            happens = self._happens.get(message["kind"])
            if happens is None:
                raise _elsewhere("waits for a step", message)
            happens(message)

    def next(self, kind: str, engine: str) -> Any:
        """See `Hears`."""
        while True:
            message = self._hear()
            if message["kind"] == kind and message["engine"] == engine:
                return message["value"]
            if message["kind"] not in MEANWHILE:
                raise _elsewhere(f"waits for {kind!r} of engine {engine!r}", message)
            self._happens[message["kind"]](message)

    def _hear(self) -> Message:
        message, self._record = self._record or self._ears.hear(), None
        self.readings = message.get("readings", self.readings)
        return message

    def _load(self, message: Message) -> None:
        try:
            weights = self._models.loader.load_share(message)
        except MLXProviderError as error:
            if isinstance(error, ProcessLost):
                raise
            log.error("%s is not loaded: %s", message["name"], error.message)
            return  # rank 0 reports it to the client
        self._loaded[message["model"]] = weights

    def _start(self, message: Message) -> None:
        weights = self._loaded[message["model"]]
        options = ModelOptions.model_validate(message["options"])
        try:
            self._models.builder.start(weights, message["choice"], options)
        except MLXProviderError as error:
            if isinstance(error, ProcessLost):
                raise
            log.error("%s does not run: %s", weights.name, error.message)
            return  # as on rank 0
        self._engines[engine_name(weights, message["choice"])] = weights.engines[
            message["choice"]
        ].engine

    def _unload(self, message: Message) -> None:
        weights = self._loaded.pop(message["model"])
        for kind in weights.engines:
            del self._engines[engine_name(weights, kind)]
        self._models.loader.unload_here(weights)

    def _submit(self, message: Message) -> None:
        request = decode_request(message)
        self._requests[request.id] = request
        self._engines[message["engine"]].submit(request)

    def _ended(self, message: Message) -> None:
        request = self._requests.pop(message["id"], None)
        if request is not None:
            self._engines[message["engine"]].cancel(request)

    def _act(self, message: Message) -> None:
        engine = self._engines[message["engine"]]
        engine.act(Codec(engine.scheduler).decode_opening(message))

    def _step(self, message: Message) -> None:
        self._record = message
        self._engines[message["engine"]].step()
        gone = [name for name, each in self._requests.items() if each.phase is Phase.DONE]
        for name in gone:
            del self._requests[name]
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()


def _elsewhere(here: str, message: Message) -> ProcessLost:
    return ProcessLost(f"this rank {here}; rank 0 is at {message['kind']!r}: they are out of step")
