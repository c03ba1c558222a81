"""A loaded text model of mlx-lm, for families that take only text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BadRequest
from ..records import Features, LoadOptions, MediaItem, MediaSpan, ModelInfo, PrefillChunk, Prompt
from ..upstream import mlx_lm
from ..upstream.patching import patch_ssm_step_size
from . import caches
from . import logits as outputs
from .caches import text_cache
from .info import NO_STATES, describe
from .layers import expand, route_attention
from .tokenizer import HFTokenizer


@dataclass(frozen=True)
class TextModel(outputs.FromHidden):
    """A `LoadedModel`, `HiddenStatesModel` and `PromptLogitsModel`, which `records` describes, for
    the positions of plain text. `FromHidden` adds `prefill` and `decode`."""

    model: Any
    tokenizer: HFTokenizer
    info: ModelInfo
    kv_layouts: Sequence[str]
    backbone: outputs.Path | None = None
    """See `logits.find_backbone`."""

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem],
        variables: Mapping[str, Any],
    ) -> Prompt:
        if media:
            raise BadRequest("this model takes text only: remove the image", param="messages")
        return self.tokenizer.render(messages, tools, variables)

    def embed(self, span: MediaSpan) -> Features:
        raise BadRequest("this model takes text only", param="messages")

    def make_cache(self) -> list[Any]:
        return text_cache(self.model)

    @property
    def has_hidden_states(self) -> bool:
        return self.backbone is not None

    def decode_hidden(
        self,
        tokens: mx.array,
        cache: list[Any],
        positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        keep = outputs.rows_at(logits_at)
        logits, hidden = self._run(tokens[:, None], cache, keep, keep)
        return logits[:, -1], hidden[:, -1]

    def prefill_hidden(self, chunk: PrefillChunk, last: int) -> tuple[mx.array, mx.array]:
        logits, hidden = self._run(
            _tokens(chunk), chunk.cache, outputs.last_token, lambda states: states[:, -last:]
        )
        return logits[0, -1], hidden[0]

    def prefill_logits(self, chunk: PrefillChunk) -> mx.array:
        logits: mx.array = self.model(_tokens(chunk), cache=chunk.cache)
        return logits[0]

    def _run(
        self, tokens: mx.array, cache: list[Any], keep: outputs.Keep, states_at: outputs.Keep
    ) -> tuple[mx.array, mx.array]:
        """Logits of the positions that `keep` selects, hidden states of those of `states_at`."""
        store = outputs.StateStore(keep, states_at)
        logits = outputs.narrow_output(self.model, self.backbone, store)(tokens, cache=cache)
        return logits, store.hidden


def _tokens(chunk: PrefillChunk) -> mx.array:
    """Ids (1, length)."""
    return mx.array(list(chunk.prompt.tokens[chunk.start : chunk.stop]))[None]


def load_text(
    path: Path,
    options: LoadOptions,
    *,
    classes: mlx_lm.Classes | None = None,
    change: Callable[[Any], None] | None = None,
    variant: str = "",
) -> TextModel:
    """Load weights and tokenizer. All batch layouts are offered; the engine's probe chooses.

    `classes`: a function from a config to the classes of the model and of its arguments. `None`:
    mlx-lm's own. `change` changes the loaded model. `variant`: a text for the fingerprint that
    differs if `change` alters the model's KV. Raises `UnsupportedModel` and `BadRequest`."""
    loaded = mlx_lm.load(
        path, adapter=options.adapter, trust_remote_code=options.trust_remote_code, classes=classes
    )
    if options.dtype is not None:
        expand(loaded.model, options.dtype)
    if change is not None:
        change(loaded.model)
    tokenizer = HFTokenizer(loaded.tokenizer, loaded.renderer)
    one, some = mx.array([[1]]), mx.array([[1, 2, 3]])  # any token ids
    route_attention(loaded.model)
    caches.route(lambda cache: loaded.model(one, cache=cache), text_cache(loaded.model))
    patch_ssm_step_size()
    mx.eval(loaded.model.parameters())
    stops = loaded.stop_tokens
    info = describe(
        path, loaded.config, loaded.model, tokenizer, options, stop_tokens=stops, variant=variant
    )
    bounded = tokenizer.within(info.context_length)
    backbone = outputs.find_backbone(
        loaded.model, lambda model: model(some, cache=text_cache(model))
    )
    if backbone is None:  # the states below the output matrix are unknown
        info = replace(info, embedding=replace(info.embedding, refusal=NO_STATES))
    return TextModel(loaded.model, bounded, info, ("grouped", "merged", "solo"), backbone)
