"""How far log-probabilities of one token may differ between two ways to compute it.

On an NVIDIA GPU, these hold only with `MLX_ENABLE_TF32=0`, which `upstream.runtime` sets.
"""

from __future__ import annotations

LOGPROBS: dict[int | None, float] = {None: 1e-4, 8: 0.05, 4: 0.3}
"""In float32, by the bits of the KV cache. Sums in another order differ by 1e-6, which may round a
stored number to the next of 16 or 256 levels."""
