"""A model as a request sees it: weights with one name and one set of options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..chat.constraints.compiler import GrammarCompiler
from ..chat.output.turn_layout import NO_LAYOUT, TurnLayout
from ..engine.engine import Engine
from ..protocol.health import ModelStatus
from ..records import LoadedModel, ModelInfo, ReasoningParser, ToolParser
from .weights import EngineInstance, Weights, weights_gone

WARMED = 4096
"""Namespaces that have their warm prompts; the oldest gets them again."""


@dataclass(eq=False)
class ModelView:
    """Does not keep weights alive after they are unloaded."""

    name: str
    weights: Weights
    kind: str
    info: ModelInfo
    """With the operator's context length."""
    tool_parser: ToolParser | None
    reasoning_parser: ReasoningParser | None
    any_parser: ToolParser | None
    """Used if the template shows no known format."""
    forced_parser: ToolParser | None
    """The format of calls that it is forced to write then."""
    layout: TurnLayout = NO_LAYOUT
    _warmed: dict[tuple[str, int], None] = field(default_factory=dict)

    @property
    def model(self) -> LoadedModel:
        return self.weights.model

    @property
    def instance(self) -> EngineInstance:
        """Raises `EngineDied` if the weights are gone."""
        instance = self.weights.engines.get(self.kind)
        if instance is None:
            raise weights_gone()
        return instance

    @property
    def engine(self) -> Engine:
        return self.instance.engine

    @property
    def grammar(self) -> GrammarCompiler:
        return self.weights.grammar

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
        info, instance = self.info, self.weights.engines.get(self.kind)
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
            mixed_prefill=instance.engine.mixes,
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
