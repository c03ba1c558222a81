"""A model in memory: its weights, the engine on them, and the views that requests have of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..chat.constraints.compiler import GrammarCompiler
from ..chat.output.turn_layout import NO_LAYOUT, TurnLayout
from ..engine.engine import Engine
from ..engine.inputs import FeatureCache
from ..errors import EngineDied, wrong_option
from ..protocol.health import ModelStatus
from ..protocol.requests import ModelOptions
from ..records import LoadedModel, ModelInfo, ReasoningParser, ToolParser
from .hub import no_folder
from .probe import Probe
from .reproducible import Reproducible

GONE = "the engine thread died, and the model with it"
"""While a request has a lease, only that removes its model."""
WARMED = 4096
"""Maximum namespaces that a view remembers as warmed. A forgotten one is warmed again."""


@dataclass(eq=False)
class ModelView:
    """A model under one name, with its options. Does not keep weights alive after their unload."""

    name: str
    weights: Weights
    info: ModelInfo  # with the operator's context length
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    any_parser: ToolParser | None  # reads calls of any format, if the template shows no known one
    forced_parser: ToolParser | None  # the format in which the model is then forced to write calls
    layout: TurnLayout = NO_LAYOUT
    _warmed: dict[tuple[str, int], None] = field(default_factory=dict)

    @property
    def model(self) -> LoadedModel:
        return self.weights.model

    @property
    def engine(self) -> Engine:
        return self.weights.instance.engine

    def to_warm(self, namespace: str, prompts: Iterable[Any]) -> bool:
        """Whether to send these prompts: only at a namespace's first request."""
        sent = (namespace, hash(tuple(map(repr, prompts))))
        if sent in self._warmed:
            return False
        self._warmed[sent] = None
        while len(self._warmed) > WARMED:
            del self._warmed[next(iter(self._warmed))]
        return True

    @property
    def status(self) -> ModelStatus | None:
        """`None` if the weights are gone."""
        info, instance = self.info, self.weights.started
        if instance is None:
            return None
        fixed = instance.reproducible
        return ModelStatus(
            model=self.name,
            family=self.weights.family,
            plugin=self.weights.plugin,
            model_type=info.model_type,
            context_length=info.context_length,
            kv_layout=instance.engine.batch.layout.name,
            mixed_prefill=instance.engine.batch.mixes,
            noise_floor=instance.probe.noise_floor,
            drafter=instance.drafter,
            reproducible=fixed.summary if fixed else None,
            vision="image" in info.media,
            pooling=None if info.embedding.refusal else info.embedding.pooling,
            weights_bytes=info.weights_bytes,
            tool_parser=self.tool_parser.name if self.tool_parser else None,
            reasoning_parser=self.reasoning_parser.name if self.reasoning_parser else None,
            notes=[*info.notes, *instance.notes],
        )


@dataclass(eq=False)
class EngineInstance:
    engine: Engine
    probe: Probe
    reproducible: Reproducible | None = None
    drafter: str = ""
    drafter_bytes: int = 0
    keep_curve: Callable[[], None] = lambda: None
    """Stores the times of passes for the next load, if they were corrected."""
    arriving: list[str] = field(default_factory=list)
    """Tenants of admitted requests that have not reached the engine thread."""

    @property
    def notes(self) -> list[str]:
        own = self.reproducible.note if self.reproducible else ""
        return [*self.probe.notes, *filter(None, [own])]


@dataclass(eq=False)
class Weights:
    key: WeightsKey
    name: str  # as in the request that loaded it, with the folder of an adapter
    family: str
    plugin: str
    info: ModelInfo
    loaded_bytes: int
    features: FeatureCache
    grammar: GrammarCompiler
    _model: LoadedModel | None
    code: str = ""
    """Digest of third-party code that computes KV. Empty: only built-in code."""
    third_party: str = ""  # name and version of the third-party plugin that serves it
    started: EngineInstance | None = None
    """`None` until its engine is built, and after it is unloaded."""
    views: dict[Any, ModelView] = field(default_factory=dict)

    @property
    def model(self) -> LoadedModel:
        """Raises `EngineDied` if the weights are gone."""
        if self._model is None:
            raise EngineDied(GONE)
        return self._model

    @property
    def instance(self) -> EngineInstance:
        """Raises `EngineDied` if the weights are gone."""
        if (found := self.started) is None:
            raise EngineDied(GONE)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights, also of those that are not in memory yet, and of drafters."""
        instance = self.started
        drafter = 0 if instance is None else instance.drafter_bytes
        return max(self.loaded_bytes, self.info.weights_bytes) + drafter

    @property
    def live_bytes(self) -> int:
        """Bytes reserved for its rows."""
        instance = self.started
        return 0 if instance is None else instance.engine.scheduler.live_bytes

    def drop(self) -> None:
        """Free all that it has, also for those who still refer to it."""
        self._model = self.started = None
        self.views.clear()
        self.features.clear()


@dataclass(frozen=True)
class WeightsKey:
    """Names and options that do not appear here share the weights and their engine."""

    folder: Path  # with links resolved: a Hub id, a path and a link to it are the same
    adapter: Path | None
    trust_remote_code: bool
    modality: Literal["auto", "text"]
    dtype: str
    extra: str  # JSON
    kind: str
    """How its engine differs from the usual one. Empty: it does not."""
    context_length: int | None = None
    """Only if longer than the model's own, for which a family may have to prepare."""

    @classmethod
    def of(cls, folder: Path, options: ModelOptions) -> WeightsKey:
        """Raises `BadRequest` if the adapter is not a folder."""
        adapter = Path(options.adapter).expanduser().resolve() if options.adapter else None
        if adapter is not None and not adapter.is_dir():
            raise wrong_option("adapter", no_folder(options.adapter or ""))
        loaded_with = options.trust_remote_code, options.modality, options.dtype
        extra = options.model_dump_json(include={"extra"})
        return cls(folder.resolve(), adapter, *loaded_with, extra, engine_kind(options))


def kv_kind(options: ModelOptions) -> str:
    """The form of KV, such as `4 bits`. Empty: not quantised."""
    return f"{options.kv_bits} bits" if options.kv_bits else ""


def engine_kind(options: ModelOptions) -> str:
    """How an engine with these options differs from the usual one. Empty: it does not."""
    fixed = "reproducible" if options.reproducible else ""
    drafter = "" if options.drafter == "auto" else options.drafter
    if options.draft_model:
        drafter = f"{options.drafter} {options.draft_model}"
    share = options.sparse_prefill
    sparse = "" if share is None else f"{share} of long prompts"
    return " ".join(filter(None, (kv_kind(options), fixed, drafter, sparse)))
