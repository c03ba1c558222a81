"""A Llama's forward pass in NumPy over the weights of a GGUF file, as gguf-py reads them.

It shares no code with MLX, mlx-lm or this project: two mistakes would have to agree.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

Array = NDArray[np.float32]
BLOCK = 512
"""Queries whose scores are in memory at once."""


class NumpyLlama:
    """Log-probabilities of the next token after each token of a text."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)

        def number(key: str) -> float:
            return float(reader.fields[f"llama.{key}"].contents())

        self.weights = {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            for tensor in reader.tensors
        }
        self.layers = int(number("block_count"))
        self.heads = int(number("attention.head_count"))
        self.kv_heads = int(number("attention.head_count_kv"))
        self.epsilon = number("attention.layer_norm_rms_epsilon")
        self.rope_base = number("rope.freq_base")

    def logprobs(self, tokens: Sequence[int], start: int = 0) -> Array:
        """Of shape (tokens from `start` on, vocabulary)."""
        table = self.weights["token_embd.weight"]
        x = table[np.asarray(tokens)]
        for layer in range(self.layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm"))
            x = x + self._mlp(layer, self._norm(x, f"blk.{layer}.ffn_norm"))
        x = self._norm(x[start:], "output_norm")
        logits = x @ self.weights.get("output.weight", table).T
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return logits

    def _norm(self, x: Array, name: str) -> Array:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + np.float32(self.epsilon)) * self.weights[f"{name}.weight"]

    def _linear(self, layer: int, name: str, x: Array) -> Array:
        return x @ self.weights[f"blk.{layer}.{name}.weight"].T

    def _mlp(self, layer: int, x: Array) -> Array:
        gate = self._linear(layer, "ffn_gate", x)
        gate = gate / (1 + np.exp(-gate))
        return self._linear(layer, "ffn_down", gate * self._linear(layer, "ffn_up", x))

    def _attention(self, layer: int, x: Array) -> Array:
        count = len(x)
        q = self._rotated(self._linear(layer, "attn_q", x).reshape(count, self.heads, -1))
        k = self._rotated(self._linear(layer, "attn_k", x).reshape(count, self.kv_heads, -1))
        v = self._linear(layer, "attn_v", x).reshape(count, self.kv_heads, -1)
        out = np.empty_like(q)
        for head in range(self.heads):
            of = head * self.kv_heads // self.heads
            for at in range(0, count, BLOCK):
                end = min(at + BLOCK, count)
                scores = q[at:end, head] @ k[:end, of].T / np.sqrt(np.float32(q.shape[-1]))
                later = np.arange(end)[None] > np.arange(at, end)[:, None]
                scores = np.where(later, -np.inf, scores)
                scores = np.exp(scores - scores.max(-1, keepdims=True))
                scores /= scores.sum(-1, keepdims=True)
                out[at:end, head] = scores @ v[:end, of]
        return self._linear(layer, "attn_output", out.reshape(count, -1))

    def _rotated(self, x: Array) -> Array:
        """Rotary positions on neighbouring pairs, which is how GGUF orders a head's rows."""
        size = x.shape[-1]
        speed = self.rope_base ** (-np.arange(0, size, 2) / size)
        angles = np.arange(len(x))[:, None] * speed
        cos, sin = (f(angles).astype(np.float32)[:, None] for f in (np.cos, np.sin))
        even, odd = x[..., 0::2], x[..., 1::2]
        pairs = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        return pairs.reshape(x.shape)
