"""Kernels for NVIDIA GPUs: products and attention in the forms that MLX computes fast there."""

from collections.abc import Iterable

from mlx_provider import Kernels, Replacement, UpstreamPatch, hookimpl

mlx_provider_api = 1
MLX = "mlx 0.32.4"
REASON = "N rows of one token each cost N times one row; as one matrix they cost about one"
PLANS = "cuDNN makes a plan for each new number of queries and keys, which takes 40 to 75 ms"
SORTED = "CUDA's product of quantised experts makes no matrix of sorted rows"
PATCHES = (
    UpstreamPatch("mlx.nn.layers.quantized.QuantizedEmbedding.as_linear", MLX, REASON),
    UpstreamPatch("mlx.nn.layers.quantized.QuantizedLinear.__call__", MLX, REASON),
    UpstreamPatch("mlx_lm.models.mla.QuantizedMultiLinear.__call__", MLX, REASON),
    UpstreamPatch("mlx_vlm.models.mla.QuantizedMultiLinear.__call__", MLX, REASON),
    UpstreamPatch("mlx_lm.models.base.scaled_dot_product_attention", MLX, PLANS),
    UpstreamPatch("mlx_vlm.models.base.scaled_dot_product_attention", MLX, PLANS),
    UpstreamPatch("mlx_lm.models.switch_layers.QuantizedSwitchLinear.__call__", MLX, SORTED),
    UpstreamPatch("mlx_vlm.models.switch_layers.QuantizedSwitchLinear.__call__", MLX, SORTED),
)


def matches(device: str, precision: str) -> bool:
    """CUDA alone, in any precision. Metal makes one matrix of all rows by itself, if they are
    contiguous (mlx 0.32.4, backend/metal/quantized.cpp, `non_batched`)."""
    return device == "cuda"


def replacements() -> Iterable[Replacement]:
    from .forms import REPLACEMENTS

    return REPLACEMENTS


@hookimpl
def mlx_kernels() -> Iterable[Kernels]:
    serves = "on an NVIDIA GPU: quantised products, and attention of prompts in few shapes"
    yield Kernels("cuda", matches, replacements, serves=serves, patches=PATCHES)
