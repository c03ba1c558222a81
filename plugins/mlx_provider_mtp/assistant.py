"""Gemma 4's assistants: a few layers that read the keys and values of the model.

Their class is from mlx-vlm (mlx_vlm/speculative/drafters/gemma4_assistant 0.7.10), called layer by
layer for many rows. An assistant stores nothing for a row. It reads the model's last state, and
attends to the keys and values of the model's last layer of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider import BadRequest
from mlx_provider.errors import MLXProviderError
from mlx_provider.families.caches import visible
from mlx_provider.families.checkpoint import read_json
from mlx_provider.records import DeviceTokens, DraftRow, Parts, Run

from .checkpoint import read_all
from .followed_rows import last_token
from .judged import Guess, Judged
from .weights import Named, load_into

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
NONE_GIVEN = "it needs a Gemma 4 assistant for this model: name its folder (draft_model)"
NO_KINDS = "the layers of the model are not those of Gemma 4"
MOST_LAYERS = 64
"""Of the assistant itself. Published ones have four."""


def problem(folder: Path | None, model: Any) -> str:
    """Why the checkpoint cannot draft for a loaded model; empty: it can. Reads no weights."""
    if folder is None:
        return NONE_GIVEN
    try:
        if read_json(folder / "config.json").get("model_type") not in MODEL_TYPES:
            return f"{folder} holds no Gemma 4 assistant"
        return _unlike(_module(folder).config, model)
    except MLXProviderError as error:
        return error.message


def _unlike(config: Any, model: Any) -> str:
    language, text = language_of(model.model), config.text_config
    kinds = {} if language is None else layers_by_kind(language)
    if language is None or not kinds:
        return NO_KINDS
    models = getattr(language, "args", None) or language.config  # of mlx-lm, of mlx-vlm
    pairs = {
        "hidden size": (config.backbone_hidden_size, models.hidden_size),
        "vocabulary": (text.vocab_size, model.info.vocab_size),
        **{
            name.replace("_", " "): (getattr(text, name), getattr(models, name, None))
            for name in ("head_dim", "global_head_dim", "sliding_window")
        },
    }
    for what, (one, other) in pairs.items():
        if one != other:
            return f"it was trained for another model: its {what} is {one}, here it is {other}"
    missing = set(text.layer_types) - kinds.keys()
    return f"it reads layers of a kind that the model has not: {min(missing)}" if missing else ""


def language_of(model: Any) -> Any:
    """The text model in a model of mlx-lm or mlx-vlm; `None`: there is none."""
    language = getattr(model, "language_model", model)
    return language if hasattr(getattr(language, "model", None), "embed_tokens") else None


def layers_by_kind(language: Any) -> dict[str, int]:
    """The last layer of each kind that stores keys and values, as an index of the caches."""
    kinds = [getattr(layer, "layer_type", "") for layer in language.model.layers]
    stored = len(language.make_cache()) if hasattr(language, "make_cache") else len(kinds)
    return {kind: at for at, kind in enumerate(kinds[:stored]) if kind}


def _module(folder: Path) -> Any:
    """mlx-vlm's assistant without weights, not evaluated. Raises `BadRequest` for a config
    that it cannot read."""
    from mlx_vlm.speculative.drafters.gemma4_assistant import Model, ModelConfig

    given = read_json(folder / "config.json")
    try:
        layers = given["text_config"]["num_hidden_layers"]
        if layers > MOST_LAYERS:
            summary = f"it has {layers} layers, at most {MOST_LAYERS} are served"
            raise BadRequest(summary, param="draft_model")
        return Model(ModelConfig.from_dict(given))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"its config cannot be read: {error!r}", param="draft_model") from error


def drafting(folder: Path, model: Any, kv_bytes: int) -> AssistantDrafting:
    """The assistant in a folder, for a model that `problem` accepts, with the model's embedding. It
    stores no keys. Raises `BadRequest` if its weights do not fit."""
    language, module = language_of(model), _module(folder)
    tensors = module.sanitize(read_all(folder, language.model.norm.weight.dtype))
    load_into(module, tensors, language, Named("the assistant", "", "draft_model"))
    kinds = {each: layers_by_kind(language)[each] for each in module.config.text_config.layer_types}
    return AssistantDrafting(
        module, f"the assistant in {folder.name}", kinds, partial(_embedded, language.model)
    )


def _embedded(text: Any, tokens: mx.array) -> mx.array:
    """(rows, 1, width)"""
    found: mx.array = text.embed_tokens(tokens) * getattr(text, "embed_scale", 1.0)
    return found


@dataclass(frozen=True)
class Seen:
    """The data that an assistant reads for one row."""

    row: DraftRow
    hidden: mx.array
    """States of the model for the row's last tokens."""
    stored: Mapping[str, tuple[mx.array, mx.array]]
    """Keys and values by kind of layer, newest last. The last ones can be unread."""

    @property
    def tokens(self) -> int:
        """Number of tokens before the last one, with all unread ones."""
        unread = self.row.unread
        return len(self.row.tokens) - 1 + (0 if unread is None else unread.tokens.size)

    @property
    def stale(self) -> mx.array:
        """Number of these that are rejected, (1,) int32."""
        unread = self.row.unread
        if unread is None:
            return mx.zeros(1, mx.int32)
        return unread.tokens.size - 1 - unread.held

    @property
    def state(self) -> mx.array:
        """The state from which the last token was drawn, (1, width)."""
        unread = self.row.unread
        return self.hidden[-1:] if unread is None else self.hidden[self.row.fresh + unread.held]

    def mask(self, kind: str, window: int) -> mx.array | None:
        """(1, tokens): the stored tokens that the last token attends to. `None`: all."""
        stored = self.stored[kind][0].shape[2]
        sees = None if kind == "full_attention" else window
        if self.row.unread is None and (sees is None or stored <= sees):
            return None
        return visible(stored - 1 - self.stale, stored, sees)


class AssistantDrafting:
    """A `Drafting` with one pass per guess that supports unread tokens."""

    drafts_ahead = True

    def __init__(
        self, module: Any, name: str, kinds: Mapping[str, int], embed: Callable[..., mx.array]
    ) -> None:
        """`name`: kind and checkpoint of the drafter; `kinds`: indices of the caches that it
        reads, by kind of layer; `embed`: of the model."""
        self.module = module
        self.judged = Judged(name)
        self._kinds = kinds
        self._embed = embed
        self._window = module.config.text_config.sliding_window

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int]]:
        """Greedy guesses. Does not wait for the device."""
        for row in rows:
            self.judged.look(row.state, row.tokens)
            row.state = None
        able = [seen for row in rows if (seen := self._seen(row)) is not None]
        if not able:
            return [() for _ in rows]
        for each, drafts in zip(able, self._guess(able), strict=True):
            each.row.state = Guess.of(each.row, DeviceTokens(drafts).first(each.row.wanted))
        return [() if row.state is None else row.state.tokens for row in rows]

    def _guess(self, rows: Sequence[Seen]) -> mx.array:
        """(rows, maximum number of wanted guesses)"""
        runs = [Run(None, slice(at, at + 1)) for at in range(len(rows))]
        keys, masks = {}, {}
        for kind in self._kinds:
            pairs = zip(*(each.stored[kind] for each in rows), strict=True)
            keys[kind] = tuple(Parts([*each], runs) for each in pairs)
            masks[kind] = [each.mask(kind, self._window) for each in rows]
        held = [each.tokens - each.stale for each in rows]
        # one position for all guesses, as in mlx-vlm 0.7.10 (mlx_vlm/speculative/mtp.py)
        places = mx.maximum(mx.concatenate(held) - 1, 0)
        hidden = mx.concatenate([each.state for each in rows])[:, None]
        tokens = mx.concatenate([last_token(each.row) for each in rows])[:, None]
        guesses = []
        for _ in range(max(each.row.wanted for each in rows)):
            inputs = mx.concatenate([self._embed(tokens), hidden], axis=-1)
            found = self.module.pre_projection(inputs)
            for layer in self.module.model.layers:
                kind = layer.layer_type
                found, _, _ = layer(found, masks[kind], shared_kv=keys[kind], offset=places)
            normed = self.module.model.norm(found)
            hidden, tokens = self.module.post_projection(normed), self._best(normed)
            mx.async_eval(tokens)  # type: ignore[no-untyped-call]
            guesses.append(tokens)
        return mx.concatenate(guesses, axis=1)

    def _best(self, hidden: mx.array) -> mx.array:
        """(rows, 1) int32"""
        module, embedding = self.module, self.module.model.embed_tokens
        if module.masked_embedding is not None:
            found: mx.array = module.masked_embedding.argmax(hidden, embedding.weight)
            return found
        tied = module.config.tie_word_embeddings
        logits = embedding.as_linear(hidden) if tied else module.lm_head(hidden)
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    def _seen(self, row: DraftRow) -> Seen | None:
        """`None`: there is no state, or a layer has no unquantised keys and values."""
        if row.cache is None or row.hidden is None:
            return None
        found = {kind: row.cache[at] for kind, at in self._kinds.items()}
        pairs = {kind: pair for kind, pair in found.items() if pair is not None}
        return Seen(row, row.hidden, pairs) if len(pairs) == len(found) else None
