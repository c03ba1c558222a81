"""Maps names and options of a model to its weights, and to the view of a request."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..chat.output.turn_layout import layout_of
from ..errors import BadRequest, Forbidden, wrong_option
from ..families.checkpoint import named_context, read_json
from ..families.tokenizer.template_fit import fit_messages
from ..protocol.options import ModelOptions
from ..records import LoadedModel
from ..registry import PluginRegistry
from .drafting import UNNAMED, check_drafts, draft_kind
from .kv_choice import engine_kind
from .model_view import ModelView
from .sparse_prefill import check_sparse_prefill, sparse_kind
from .weights import Weights
from .weights_key import WeightsKey

MAX_VIEWS = 64
"""Most views of one model."""


class Aliases:
    """Safe from any thread."""

    def __init__(self, registry: PluginRegistry) -> None:
        self._registry = registry
        self._own_context: dict[Path, int] = {}

    def check(self, options: ModelOptions) -> None:
        try:
            if options.tool_parser:
                self._registry.tool_parser(options.tool_parser)
            if options.reasoning_parser:
                self._registry.reasoning_parser(options.reasoning_parser)
            if options.drafter not in UNNAMED:
                self._registry.drafter(options.drafter)
        except BadRequest as error:
            raise wrong_option(error.param or "", error.message) from None
        check_drafts(options)
        check_sparse_prefill(options)

    def key(self, folder: Path, options: ModelOptions, *, may_lengthen: bool) -> WeightsKey:
        """`may_lengthen`: whether a context longer than the model's own is allowed, for which a
        family may need other weights. Raises `Forbidden`, `BadRequest`."""
        key = WeightsKey.of(folder, options)
        if options.context_length is None:
            return key
        config = read_json(key.folder / "config.json")
        own = self._own_context.get(key.folder) or named_context(
            config.get("text_config") or config
        )
        if own is None or options.context_length <= own:
            return key
        if not may_lengthen:
            raise _too_long(options)
        return replace(key, context_length=options.context_length)

    def misjudged(self, key: WeightsKey, weights: Weights, options: ModelOptions) -> bool:
        """Whether the load has shown that `key` names the wrong weights: only the loaded model has
        its exact context length."""
        if key.context_length is not None:
            return False
        own = self._own_context[key.folder] = weights.info.context_length
        return own < (options.context_length or 0)

    def kind(self, options: ModelOptions) -> str:
        kinds = [engine_kind(options), draft_kind(options), sparse_kind(options)]
        return " ".join(filter(None, kinds))

    def view(
        self, weights: Weights, name: str, options: ModelOptions, *, listed: bool = True
    ) -> ModelView:
        """The same view as long as the weights stay. `listed`: if false, its context length is that
        of one request, and appears nowhere."""
        if not listed:
            found = self.view(weights, name, options.model_copy(update={"context_length": None}))
            length = options.context_length or found.info.context_length
            return replace(found, info=replace(found.info, context_length=length))
        chosen = (
            name,
            self.kind(options),
            options.context_length,
            options.tool_parser,
            options.reasoning_parser,
            options.pooling,
        )
        views = weights.views
        view = views.get(chosen)
        if view is None:
            view = views.setdefault(chosen, self._view(weights, name, options))
            while len(views) > MAX_VIEWS:
                views.pop(next(iter(views)), None)
        return view

    def _view(self, weights: Weights, name: str, options: ModelOptions) -> ModelView:
        info, registry = weights.info, self._registry
        tool = options.tool_parser or info.tool_parser
        thought = options.reasoning_parser or info.reasoning_parser
        template = info.chat_template or ""
        calls = registry.tool_parser(tool) if tool else registry.detect_tool_parser(template)
        thoughts = (
            registry.reasoning_parser(thought)
            if thought
            else registry.detect_reasoning_parser(template)
        )
        return ModelView(
            name=name,
            weights=weights,
            kind=self.kind(options),
            info=replace(
                info,
                context_length=options.context_length or info.context_length,
                embedding=replace(
                    info.embedding, pooling=options.pooling or info.embedding.pooling
                ),
            ),
            tool_parser=calls,
            reasoning_parser=thoughts,
            layout=layout_of(partial(_rendered, weights.model), thoughts, calls),
            any_parser=registry.fallback_tool_parser("read"),
            forced_parser=registry.fallback_tool_parser("write"),
        )


def _too_long(options: ModelOptions) -> Forbidden:
    """Each longer context needs separate weights of a model."""
    return Forbidden(
        f"context_length {options.context_length} is beyond the model's own: grant it where the "
        "engine runs, in its owner's models file (MLX_PROVIDER_MODELS_FILE)",
        param="options.context_length",
    )


def _rendered(model: LoadedModel, messages: list[dict[str, Any]]) -> str:
    fitted = fit_messages(messages, model.info.template)
    return model.prepare(fitted, tools=[], media=[], variables={}).text
