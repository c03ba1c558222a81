"""Test whether MLX can be imported."""

from __future__ import annotations

import importlib
import sys

from ..errors import EngineUnavailable, NotInstalled


def require_mlx() -> None:
    """Import `mlx.core`. Raises `NotInstalled` with the package to install, and `EngineUnavailable`
    if the GPU has no memory for it, which MLX tells in an `ImportError`, too.

    On Linux, the package `mlx` has no library: it comes with `mlx-cpu` or `mlx-cuda-13`.
    """
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        if "cudaMalloc" in str(error) or "out of memory" in str(error):
            raise EngineUnavailable(
                f"the memory of the GPU is full ({error}): end the processes that use it, which "
                "nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
            ) from None
        raise NotInstalled(f"MLX cannot be imported ({error}): {_remedy()}") from None


def _remedy() -> str:
    if sys.platform == "darwin":
        return "pip install mlx (needs an Apple silicon Mac and a native arm64 Python)"
    return (
        "pip install 'mlx-provider[cpu]' for a machine without a GPU, "
        "or 'mlx-provider[cuda13]' for an NVIDIA GPU"
    )
