"""LFM3, in mlx-lm's terms: short convolutions, attention over a window, and attention over all.

Written after what transformers computes (`models/lfm3/modeling_lfm3.py`, 5.23.0); names of weights
are those of its checkpoints, which transformers itself changes (`conversion_mapping.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    create_ssm_mask,
    scaled_dot_product_attention,
)
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope

CONV, WINDOW, FULL = "conv", "sliding_attention", "full_attention"
ROTATIONS: dict[str, dict[str, Any]] = {
    WINDOW: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def layer_kinds(layers: int) -> list[str]:
    """What the layers are where `config.json` does not say."""
    kinds = {2: FULL, 0: WINDOW}
    return [CONV] + [kinds.get(i % 4, CONV) for i in range(1, layers)]


@dataclass
class ModelArgs(BaseModelArgs):
    """Entries of `config.json`; what it leaves out is as transformers has it."""

    model_type: str = "lfm3"
    vocab_size: int = 128_000
    hidden_size: int = 2048
    intermediate_size: int = 7680
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    head_dim: int = 128
    norm_eps: float = 1e-5
    attention_bias: bool = False
    conv_bias: bool = False
    conv_L_cache: int = 7  # noqa: N815
    """Tokens that a convolution sees, the newest one among them."""
    sliding_window: int = 256
    use_attention_gate: bool = True
    use_sandwich_norm: bool = True
    tie_word_embeddings: bool = True
    layer_types: list[str] = field(default_factory=list)
    rope_parameters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layer_types = self.layer_types or layer_kinds(self.num_hidden_layers)
        if unknown := set(self.layer_types) - {CONV, WINDOW, FULL}:
            raise ValueError(f"layers of LFM3 are {CONV}, {WINDOW} or {FULL}, not {unknown}")
        self.rope_parameters = self.rope_parameters or ROTATIONS


class Attention(nn.Module):
    """Grouped queries with a norm on each head, and a gate on what each head has found."""

    def __init__(self, args: ModelArgs, kind: str) -> None:
        super().__init__()
        hidden, size, bias = args.hidden_size, args.head_dim, args.attention_bias
        self.heads, self.kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.scale = size**-0.5
        self.q_proj = nn.Linear(hidden, self.heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(self.heads * size, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(size, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=args.norm_eps)
        if args.use_attention_gate:
            self.gate_proj = nn.Linear(hidden, self.heads, bias=False)
        turns = args.rope_parameters[kind]
        self.rope = initialize_rope(size, turns["rope_theta"], False, turns)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        """(B, L, hidden) -> the same"""
        offset = 0 if cache is None else cache.offset
        queries = self.rope(self.q_norm(_heads(self.q_proj(x), self.heads)), offset=offset)
        keys = self.rope(self.k_norm(_heads(self.k_proj(x), self.kv_heads)), offset=offset)
        values = _heads(self.v_proj(x), self.kv_heads)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        found = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        found = found.transpose(0, 2, 1, 3)
        if "gate_proj" in self:
            found = found * mx.sigmoid(self.gate_proj(x))[..., None]
        return self.o_proj(found.reshape(*x.shape[:2], -1))


def _heads(x: mx.array, heads: int) -> mx.array:
    """(B, L, heads x D) -> (B, heads, L, D)"""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


class ShortConvolution(nn.Module):
    """A gated convolution over a token and the few before it, which its cache holds.

    Its arguments are what `mlx_provider.families.caches` asks for, and what it does with
    `lengths` and `advance` is what mlx-lm's `ArraysCache` asks for.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        hidden, bias = args.hidden_size, args.conv_bias
        self.before = args.conv_L_cache - 1
        self.conv = nn.Conv1d(hidden, hidden, args.conv_L_cache, groups=hidden, bias=bias)
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=bias)

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """(B, L, hidden) -> the same. `mask`: (B, L) bool, false where a row has no token."""
        gate, out_gate, x = mx.split(self.in_proj(x), 3, axis=-1)
        x = gate * x
        if mask is not None:
            x = mx.where(mask[..., None], x, 0)
        state = None if cache is None else cache[0]
        if state is None:
            state = mx.zeros((x.shape[0], self.before, x.shape[-1]), x.dtype)
        seen = mx.concatenate([state, x], axis=1)
        if cache is not None:
            cache[0] = self._last(seen, cache.lengths)
            cache.advance(x.shape[1])
        return self.out_proj(out_gate * self.conv(seen))

    def _last(self, seen: mx.array, lengths: mx.array | None) -> mx.array:
        """What the next call needs; `lengths`: tokens of each row, where some rows have fewer."""
        tokens = seen.shape[1] - self.before
        if lengths is None:
            return mx.contiguous(seen[:, tokens:])
        ends = mx.clip(lengths, 0, tokens)[:, None] + mx.arange(self.before)
        return mx.take_along_axis(seen, ends[..., None], axis=1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.w2 = nn.Linear(args.intermediate_size, args.hidden_size, bias=False)
        self.w3 = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.w2(nn.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    """Norms before and behind both halves."""

    def __init__(self, args: ModelArgs, kind: str) -> None:
        super().__init__()
        if kind == CONV:
            self.conv = ShortConvolution(args)
        else:
            self.self_attn = Attention(args, kind)
        self.feed_forward = FeedForward(args)
        self.operator_norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
        self.sandwich = args.use_sandwich_norm
        if self.sandwich:
            self.post_operator_norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)
            self.post_ffn_norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        operator = self.conv if "conv" in self else self.self_attn
        found = operator(self.operator_norm(x), mask, cache)
        x = x + (self.post_operator_norm(found) if self.sandwich else found)
        found = self.feed_forward(self.ffn_norm(x))
        return x + (self.post_ffn_norm(found) if self.sandwich else found)


class Backbone(nn.Module):
    """Everything below the output matrix."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.kinds = args.layer_types
        self.window = args.sliding_window
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args, kind) for kind in self.kinds]
        self.embedding_norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        x = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        caches = [None] * len(self.layers) if cache is None else cache
        masks = {kind: self._mask(kind, x, caches) for kind in set(self.kinds)}
        for layer, kind, own in zip(self.layers, self.kinds, caches, strict=True):
            x = layer(x, masks[kind], own)
        return self.embedding_norm(x)

    def _mask(self, kind: str, x: mx.array, caches: Sequence[Any]) -> Any:
        """Layers of one kind have caches of one form, of which the first tells the mask."""
        first = caches[self.kinds.index(kind)]
        if kind == CONV:
            return create_ssm_mask(x, first)
        return create_attention_mask(x, first, window_size=self.window if kind == WINDOW else None)


class Model(nn.Module):
    """See `mlx_lm.models`: what mlx-lm and `mlx_provider.families.text` ask of a model."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Backbone(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """(B, L) -> logits (B, L, vocab)"""
        x = self.model(inputs, cache, input_embeddings)
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(x)
        return self.lm_head(x)

    @property
    def layers(self) -> list[Layer]:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """Of one row, layer by layer."""
        kinds = {CONV: lambda: ArraysCache(1), FULL: KVCache, WINDOW: self._window}
        return [kinds[kind]() for kind in self.args.layer_types]

    def _window(self) -> RotatingKVCache:
        return RotatingKVCache(max_size=self.args.sliding_window)

    def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Weights of transformers' checkpoints as this model names and lays them out.

        torch has a convolution's weight as (channels, 1, tokens), MLX as (channels, tokens, 1).
        """
        found = dict(weights)
        if self.args.tie_word_embeddings:
            found.pop("lm_head.weight", None)
        for name, value in found.items():
            if name.endswith("conv.conv.weight") and value.shape[1] == 1:
                found[name] = value.swapaxes(1, 2)
        return found
