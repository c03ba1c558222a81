"""How far log-probabilities of one token may differ between two ways to compute it."""

import mlx.core as mx

DTYPES = {
    ("float32", "cpu"): 1e-4,
    ("float32", "gpu"): 1e-4,
    ("low", "cpu"): 0.05,
    ("low", "gpu"): 0.05,
}
"""By `ModelInfo.precision` and device. On an NVIDIA GPU, float32 holds only with
`MLX_ENABLE_TF32=0`, which `upstream.runtime` sets: 40 of 40 parity tests on an H100."""
KV_BITS: dict[int | None, float] = {None: 0.0, 8: 0.05, 4: 0.3}
"""Sums in another order differ by 1e-6, which may round a stored number to the next of 16 or 256
levels."""
FAMILIES = {"afm7": 0.01}
"""afm7 rounds keys and values to steps of 0.02 (`fake_8bit_quant`): the last bit, other in another
chunk, may move one of them by a step."""


def logprob_tolerance(
    precision: str = "float32", bits: int | None = None, family: str = ""
) -> float:
    device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    return max(DTYPES[precision, device], KV_BITS[bits], FAMILIES.get(family, 0.0))
