"""A model in memory, the engines that run on its weights, and what a request sees of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..chat.constraints.compiler import GrammarCompiler
from ..chat.output.turn_layout import NO_LAYOUT, TurnLayout
from ..engine.engine import Engine
from ..engine.execution.probe import Probe
from ..engine.feature_cache import FeatureCache
from ..errors import EngineDied
from ..protocol.health import ModelStatus
from ..records import LoadedModel, ModelInfo, ReasoningParser, ToolParser
from .reproducible import Reproducible

WARMED = 4096
"""Namespaces that are known to have their warm prompts; the oldest gets them again."""


@dataclass(eq=False)
class Running:
    """One engine: the requests of a model that are of one kind (`kv_choice.engine_kind`)."""

    engine: Engine
    probe: Probe
    reproducible: Reproducible | None = None
    drafter: str = ""
    """Who guesses tokens ahead; empty: nobody."""
    drafter_bytes: int = 0
    """That it takes beside the model's."""
    arriving: int = 0
    """Requests that were let in but have not reached the engine thread."""

    @property
    def notes(self) -> list[str]:
        """Why its rows do not run in the best way there is."""
        own = self.reproducible.note if self.reproducible else ""
        return [*self.probe.notes, *([own] if own else [])]


@dataclass(eq=False)
class Loaded:
    """The weights of one folder, once for every name and option that leaves them as they are."""

    key: Hashable
    folder: Path
    name: str
    """Its folder's."""
    family: str
    plugin: str
    info: ModelInfo
    taken: int
    """Bytes by which loading it has filled the device."""
    features: FeatureCache
    grammar: GrammarCompiler
    _model: LoadedModel | None
    number: int = 0
    """By which the ranks name it, where it is split over several."""
    largest: int = 0
    """Bytes of the parameters of the rank that has most."""
    code: str = ""
    """Digest of the third party's code that computes its KV; empty: it is ours alone."""
    stranger: str = ""
    """Name and version of the third party's plugin that serves it; empty: it is one of ours."""
    running: dict[str, Running] = field(default_factory=dict)
    """Engines by kind."""
    served: dict[Any, Served] = field(default_factory=dict)
    """What requests see, by name and options."""

    @property
    def model(self) -> LoadedModel:
        """Raises `EngineDied` once the weights are gone."""
        if self._model is None:
            raise _gone()
        return self._model

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; those of its parameters where these are not all in memory yet."""
        drafters = sum(each.drafter_bytes for each in list(self.running.values()))
        return max(self.taken, self.info.weights_bytes, self.largest) + drafters

    @property
    def live_bytes(self) -> int:
        """Bytes set aside for rows."""
        return sum(each.engine.scheduler.live_bytes for each in list(self.running.values()))

    def drop(self) -> None:
        """Let go of the weights and of all that stands on them."""
        self._model = None
        self.running.clear()
        self.served.clear()
        self.features.clear()


@dataclass(eq=False)
class Served:
    """A loaded model under one name, with one choice of options.

    Whoever still has it keeps no weights alive once these were unloaded.
    """

    name: str
    loaded: Loaded
    kind: str
    """Of its engine."""
    info: ModelInfo
    """The model's, with the context length that the operator chose."""
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    any_parser: ToolParser | None
    """Reads calls of a model whose template shows no known format."""
    forced_parser: ToolParser | None
    """Format of calls that such a model is made to write."""
    layout: TurnLayout = NO_LAYOUT
    """White space that the chat template writes around an assistant's texts."""
    _warmed: dict[tuple[str, int], None] = field(default_factory=dict)
    """Namespaces to which the operator's warm prompts were sent, oldest first."""

    @property
    def model(self) -> LoadedModel:
        return self.loaded.model

    @property
    def running(self) -> Running:
        """Raises `EngineDied` once the weights are gone."""
        running = self.loaded.running.get(self.kind)
        if running is None:
            raise _gone()
        return running

    @property
    def engine(self) -> Engine:
        return self.running.engine

    @property
    def grammar(self) -> GrammarCompiler:
        return self.loaded.grammar

    def to_warm(self, namespace: str, prompts: Iterable[Any]) -> bool:
        """Whether these prompts are to be sent for a namespace: the first time that it asks."""
        sent = (namespace, hash(tuple(map(repr, prompts))))
        if sent in self._warmed:
            return False
        self._warmed[sent] = None
        while len(self._warmed) > WARMED:
            del self._warmed[next(iter(self._warmed))]
        return True

    @property
    def status(self) -> ModelStatus | None:
        """`None` once the weights are gone."""
        info, running = self.info, self.loaded.running.get(self.kind)
        if running is None:
            return None
        fixed = running.reproducible
        return ModelStatus(
            model=self.name,
            family=self.loaded.family,
            plugin=self.loaded.plugin,
            model_type=info.model_type,
            context_length=info.context_length,
            kv_layout=running.engine.batch.layout.name,
            mixed_prefill=running.engine.mixes,
            noise_floor=running.probe.noise_floor,
            drafter=running.drafter,
            reproducible=fixed.told if fixed else None,
            vision="image" in info.media,
            pooling=None if info.embedding.refusal else info.embedding.pooling,
            weights_bytes=info.weights_bytes,
            tool_parser=self.tool_parser.name if self.tool_parser else None,
            reasoning_parser=self.reasoning_parser.name if self.reasoning_parser else None,
            notes=[*info.notes, *running.notes],
        )


def _gone() -> EngineDied:
    """While a request holds a model, nothing but the end of the engine thread takes it away."""
    return EngineDied("the engine thread died, and the model with it")
