"""A model in memory, and the engines that run on its weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..chat.constraints.compiler import GrammarCompiler
from ..engine.engine import Engine
from ..engine.execution.probe import Probe
from ..engine.feature_cache import FeatureCache
from ..errors import EngineDied
from ..records import LoadedModel, ModelInfo
from .reproducible import Reproducible

if TYPE_CHECKING:
    from .model_view import ModelView


@dataclass(eq=False)
class EngineInstance:
    """One engine: the requests of a model that are of one kind (`kv_choice.engine_kind`)."""

    engine: Engine
    probe: Probe
    reproducible: Reproducible | None = None
    drafter: str = ""
    """Name of the drafter; empty: none."""
    drafter_bytes: int = 0
    """Bytes of the drafter's own weights."""
    learned: Callable[[], None] = lambda: None
    """Keep what its passes have taught of their costs, for the next load."""
    arriving: int = 0
    """Requests that are admitted but have not reached the engine thread."""

    @property
    def notes(self) -> list[str]:
        """Why its rows do not run in the best way there is."""
        own = self.reproducible.note if self.reproducible else ""
        return [*self.probe.notes, *([own] if own else [])]


@dataclass(eq=False)
class Weights:
    """The weights of one folder, shared by all names and options that do not change them."""

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
    engines: dict[str, EngineInstance] = field(default_factory=dict)
    """Engines by kind."""
    views: dict[Any, ModelView] = field(default_factory=dict)
    """What requests see, by name and options."""

    @property
    def model(self) -> LoadedModel:
        """Raises `EngineDied` once the weights are gone."""
        if self._model is None:
            raise weights_gone()
        return self._model

    @property
    def nbytes(self) -> int:
        """Bytes that it takes; those of its parameters where these are not all in memory yet."""
        drafters = sum(each.drafter_bytes for each in list(self.engines.values()))
        return max(self.taken, self.info.weights_bytes, self.largest) + drafters

    @property
    def live_bytes(self) -> int:
        """Bytes set aside for rows."""
        return sum(each.engine.scheduler.live_bytes for each in list(self.engines.values()))

    def drop(self) -> None:
        """Let go of the weights and of all that stands on them."""
        self._model = None
        self.engines.clear()
        self.views.clear()
        self.features.clear()


def weights_gone() -> EngineDied:
    """While a request holds a model, nothing but the end of the engine thread takes it away."""
    return EngineDied("the engine thread died, and the model with it")
