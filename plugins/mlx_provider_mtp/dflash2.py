"""DFlash 2: drafts a block of tokens in one pass, from the outputs of some layers of a model.

Its classes are from mlx-vlm (mlx_vlm/speculative/drafters/dflash2 0.7.10), except attention. The
keys and values of a block are not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_provider import BadRequest
from mlx_provider.errors import MLXProviderError
from mlx_provider.families.checkpoint import read_json
from mlx_provider.records import DeviceTokens, DraftRow

from .checkpoint import read_all
from .followed_rows import KV_BYTES, FollowedRows, NewStates, Sizes, last_token, more
from .head import NO_LANGUAGE, language_of
from .row_states import WINDOW, RowStates, States, by_layer
from .weights import Named, load_into

CLASS = "DFlash2DraftModel"
NONE_GIVEN = "it needs a DFlash 2 checkpoint for this model: name its folder (draft_model)"
MOST_LAYERS = 64
"""Of the drafter itself. Published ones have five to eight."""


def problem(folder: Path | None, model: Any) -> str:
    """Why the checkpoint cannot draft for a loaded model; empty: it can. Reads no weights."""
    if folder is None:
        return NONE_GIVEN
    try:
        if CLASS not in (read_json(folder / "config.json").get("architectures") or []):
            return f"{folder} holds no DFlash 2 drafter"
        language = language_of(model.model)
        if language is None:
            return NO_LANGUAGE
        return _unlike(_module(folder).config, language, model.info.vocab_size)
    except MLXProviderError as error:
        return error.message


def _unlike(config: Any, language: Any, vocab: int) -> str:
    pairs = {
        "hidden size": (config.hidden_size, language.args.hidden_size),
        "vocabulary": (config.vocab_size, vocab),
        "number of layers": (config.num_target_layers, len(language.model.layers)),
    }
    for what, (own, models) in pairs.items():
        if own != models:
            return f"it was trained for another model: its {what} is {own}, here it is {models}"
    return ""


def _module(folder: Path) -> Any:
    """mlx-vlm's drafter without weights, not evaluated. Raises `BadRequest` for a config
    that it cannot read."""
    from mlx_vlm.speculative.drafters.dflash2 import Model, ModelConfig

    given = read_json(folder / "config.json")
    try:
        if given["num_hidden_layers"] > MOST_LAYERS:  # mlx-vlm lists them in its config
            summary = (
                f"it has {given['num_hidden_layers']} layers, at most {MOST_LAYERS} are served"
            )
            raise BadRequest(summary, param="draft_model")
        config = ModelConfig.from_dict(given)
        config.draft_window_size = min(WINDOW, config.draft_window_size or WINDOW)
        return Model(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRequest(f"its config cannot be read: {error!r}", param="draft_model") from error


def load_dflash2(folder: Path, model: Any) -> Any:
    """mlx-vlm's drafter in a folder, for a model of mlx-lm or mlx-vlm that `problem` accepts, with
    the model's embedding and output matrix. Raises `BadRequest` if its weights do not fit."""
    from mlx_vlm.speculative.drafters import DFlashDraftModel

    language, module = language_of(model), _module(folder)
    tensors = module.sanitize(read_all(folder, language.model.norm.weight.dtype))
    load_into(module, tensors, language, Named("the DFlash 2 drafter", "", "draft_model"))
    DFlashDraftModel.bind(module, model)  # the method of DFlash 2 needs a cache of mlx-vlm
    for layer in module.layers:
        layer.self_attn = BlockAttention(layer.self_attn)
    return module


class BlockAttention:
    """mlx-vlm's attention of a layer (`DFlashAttention`, qwen3_dflash/dflash.py 0.7.10) for the
    blocks of several rows. Each attends to its row's stored tokens; the last can be unread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.k_proj, self.v_proj = inner.k_proj, inner.v_proj  # mlx-vlm joins those of all layers

    def __call__(
        self, x: mx.array, states: mx.array, rope: Any, stored: Stored, projected: Any
    ) -> mx.array:
        """Attention of blocks (rows, L, width). New states (1, T, width) are stored first."""
        inner, masks = self._inner, stored.masks
        keys, values = projected or (self.k_proj(states), self.v_proj(states))
        keys = inner.k_norm(_heads(keys.swapaxes(0, 1), inner.n_kv_heads))
        values = _heads(values.swapaxes(0, 1), inner.n_kv_heads)
        pairs = stored.states.update_and_fetch(rope(keys, offset=stored.states.offset), values)
        queries = rope(inner.q_norm(_heads(inner.q_proj(x), inner.n_heads)), offset=stored.ends)
        own = rope(inner.k_norm(_heads(self.k_proj(x), inner.n_kv_heads)), offset=stored.ends)
        own_values = _heads(self.v_proj(x), inner.n_kv_heads)
        found = [
            mx.fast.scaled_dot_product_attention(
                queries[at : at + 1],
                mx.concatenate([row_keys, own[at : at + 1]], axis=2),
                mx.concatenate([row_values, own_values[at : at + 1]], axis=2),
                scale=inner.scale,
                mask=_with_block(None if masks is None else masks[at], x.shape[1]),
                sinks=inner.attention_sink_bias,
            )
            for at, (row_keys, row_values) in enumerate(zip(*pairs, strict=True))
        ]
        together = mx.concatenate(found).swapaxes(1, 2)
        out: mx.array = inner.o_proj(together.reshape(*x.shape[:2], -1))
        return out


def _heads(x: mx.array, heads: int) -> mx.array:
    """(rows, L, width) as (rows, heads, L, D)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def _with_block(mask: mx.array | None, length: int) -> mx.array | None:
    """The mask of stored tokens, (1, S), extended by a block that is completely visible."""
    return None if mask is None else mx.concatenate([mask, mx.ones((1, length), mx.bool_)], axis=1)


class Stored(NamedTuple):
    """The stored tokens of the rows in one layer."""

    states: States
    ends: mx.array
    """Positions of the rows' last tokens, the first ones of their blocks, (rows,) int32."""
    masks: Sequence[mx.array | None] | None
    """Masks of the stored tokens, by row. `None`: all are visible."""


class BlockDrafting(FollowedRows):
    """One pass for the blocks of all rows."""

    def __init__(self, module: Any, name: str, *, kv_bytes: int = KV_BYTES) -> None:
        """See `FollowedRows`."""
        self.module = module
        self.shown: Sequence[int] = tuple(module.config.target_layer_ids)
        """Layers of the model whose outputs it reads."""
        weight = module.norm.weight
        state = mx.zeros((1, len(self.shown) * weight.shape[0]), weight.dtype)
        seen, row = RowStates(len(module.layers)), DraftRow([0, 0], 1, 1, state)
        mx.eval([each.array for each in self.guesses([row], [seen])])  # mlx-vlm joins weights now
        window = module.config.draft_window_size
        sizes = Sizes(len(module.layers), seen.token_bytes, state.nbytes, window)
        super().__init__(name, sizes, kv_bytes)

    def guesses(self, rows: Sequence[DraftRow], seen: Sequence[RowStates]) -> list[DeviceTokens]:
        new = NewStates(rows, seen)
        last = mx.concatenate([last_token(row) for row in rows])
        ends = mx.array([len(row.tokens) - 1 for row in rows], mx.int32) + more(seen)
        layers = by_layer(seen, new.sizes, new.places)
        masks = layers[0].mask()  # those of the other layers are equal
        stored = [Stored(each, ends, masks) for each in layers]
        most = min(max(row.wanted for row in rows), self.module.config.block_size - 1)
        drafts = self.module.draft_block(last, new.hidden[None], stored, 1 + most, None)
        mx.async_eval(drafts)  # type: ignore[no-untyped-call]
        pairs = zip(drafts, rows, strict=True)
        return [DeviceTokens(own).first(row.wanted) for own, row in pairs]


def drafting(folder: Path, model: Any, kv_bytes: int) -> BlockDrafting:
    """See `load_dflash2` and `BlockDrafting`."""
    name = f"the DFlash 2 drafter in {folder.name}"
    return BlockDrafting(load_dflash2(folder, model), name, kv_bytes=kv_bytes)
