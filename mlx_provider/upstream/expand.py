"""Weights in another dtype than the checkpoint's.

MLX's CPU kernels for 16-bit and quantised weights are many times slower than those for float32
(mlx 0.32.4; the demo model's prefill of 3,800 tokens takes 17 times as long in bf16).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .file_limit import file_limit_kept

FITS = 0.5
"""Share of the memory limit that expanded weights may take; the rest is for rows and caches."""


def expand(model: Any, dtype: str) -> None:
    """Spread quantised layers out and cast all floating weights to `dtype`; evaluates nothing.

    Layers that mlx-lm's `dequantize_model` (utils.py, 0.32.2) does not know stay quantised.
    """
    with file_limit_kept():
        from mlx_lm.utils import dequantize_model

    dequantize_model(model)
    model.set_dtype(getattr(mx, dtype))


def weights_dtype(chosen: str, expanded_bytes: int, limit: int) -> str | None:
    """The dtype to load with; `None`: the checkpoint's own.

    `chosen`: the operator's option. `auto` is float32 on a CPU, where that fits into `limit`.
    """
    if chosen not in ("auto", "native"):
        return chosen
    on_cpu = mx.default_device() == mx.cpu
    return "float32" if chosen == "auto" and on_cpu and expanded_bytes <= FITS * limit else None
