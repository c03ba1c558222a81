"""Kernels in NumPy for CPUs that MLX's build does not optimise: all but Apple's."""

import sys
from collections.abc import Iterable

from mlx_provider import Kernels, Replacement, UpstreamPatch, hookimpl

mlx_provider_api = 1
LM, VLM = "mlx-lm 0.32.2", "mlx-vlm 0.7.10"
ACTIVATION = "20 ns for an exponential in MLX's CPU build; 2 ns by NumPy, in float32"
ATTENTION = "20 ns for the exponential of a score in MLX's CPU build; 2 ns by NumPy, in float32"
PATCHES = (
    UpstreamPatch("mlx.nn.layers.activations.gelu_approx", "mlx 0.32.4", ACTIVATION),
    UpstreamPatch("mlx_lm.models.activations.precise_swiglu", LM, ACTIVATION),
    UpstreamPatch("mlx_lm.models.activations.swiglu", LM, ACTIVATION),
    UpstreamPatch("mlx_lm.models.base.scaled_dot_product_attention", LM, ATTENTION),
    UpstreamPatch("mlx_vlm.models.activations.swiglu", VLM, ACTIVATION),
    UpstreamPatch("mlx_vlm.models.base.ensure_fused_sdpa", VLM, ATTENTION),
    UpstreamPatch("mlx_vlm.models.base.scaled_dot_product_attention", VLM, ATTENTION),
    UpstreamPatch("mlx_vlm.models.qwen3_5.language._precise_swiglu", VLM, ACTIVATION),
)


def matches(device: str, precision: str) -> bool:
    """A CPU outside of macOS. Any precision: each function checks the dtype of its arrays."""
    return device == "cpu" and sys.platform != "darwin"


def replacements() -> Iterable[Replacement]:
    from .functions import REPLACEMENTS

    return REPLACEMENTS


@hookimpl
def mlx_kernels() -> Iterable[Kernels]:
    serves = "on a CPU outside of macOS: attention and activations of float32"
    yield Kernels("cpu", matches, replacements, serves=serves, patches=PATCHES)
