"""A model in memory, and the engines on its weights."""

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
    """For requests of one `kv_choice.engine_kind`."""

    engine: Engine
    probe: Probe
    reproducible: Reproducible | None = None
    drafter: str = ""
    drafter_bytes: int = 0
    learned: Callable[[], None] = lambda: None
    """Stores the costs that passes have refined, for the next load."""
    arriving: list[str] = field(default_factory=list)
    """Accounts of admitted requests that have not reached the engine thread."""

    @property
    def notes(self) -> list[str]:
        own = self.reproducible.note if self.reproducible else ""
        return [*self.probe.notes, *([own] if own else [])]


@dataclass(eq=False)
class Weights:
    key: Hashable
    folder: Path
    name: str
    """As in the request that loaded it, with the folder of an adapter."""
    family: str
    plugin: str
    info: ModelInfo
    taken: int
    features: FeatureCache
    grammar: GrammarCompiler
    _model: LoadedModel | None
    number: int = 0
    """Counts the loads of this process."""
    code: str = ""
    """Digest of third-party code that computes KV. Empty: only built-in code."""
    stranger: str = ""
    """Name and version of the third-party plugin that serves it."""
    engines: dict[str, EngineInstance] = field(default_factory=dict)
    views: dict[Any, ModelView] = field(default_factory=dict)

    @property
    def model(self) -> LoadedModel:
        """Raises `EngineDied` if the weights are gone."""
        if self._model is None:
            raise weights_gone()
        return self._model

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters if these are not all in memory yet."""
        drafters = sum(each.drafter_bytes for each in list(self.engines.values()))
        return max(self.taken, self.info.weights_bytes) + drafters

    @property
    def live_bytes(self) -> int:
        return sum(each.engine.scheduler.live_bytes for each in list(self.engines.values()))

    def drop(self) -> None:
        self._model = None
        self.engines.clear()
        self.views.clear()
        self.features.clear()


def weights_gone() -> EngineDied:
    """While a request holds a model, only the death of the engine thread removes it."""
    return EngineDied("the engine thread died, and the model with it")
