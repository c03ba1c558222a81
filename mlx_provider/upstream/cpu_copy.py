"""Joining arrays on a CPU: by NumPy, into one of MLX's.

MLX's CPU build outside of macOS (0.32.4) copies element by element when it joins arrays along an
inner axis, at 2-3 GB/s where a plain copy reaches 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from . import cpu_device


def joined(pieces: Sequence[mx.array], slack: int) -> mx.array:
    """The pieces, one after another along their token axis (-2), and `slack` tokens of zeros.

    All have the same dtype and the same other axes. The result shares no memory with them; on a
    CPU it is evaluated.
    """
    first = pieces[0]
    blank = (*first.shape[:-2], slack, first.shape[-1])
    if not cpu_device.in_use() or first.dtype == mx.bfloat16:  # NumPy has no bfloat16
        zeros = [mx.zeros(blank, dtype=first.dtype)] if slack else []
        return mx.contiguous(mx.concatenate([*pieces, *zeros], axis=-2))
    tokens = sum(piece.shape[-2] for piece in pieces)
    out = mx.zeros((*first.shape[:-2], tokens + slack, first.shape[-1]), dtype=first.dtype)
    mx.eval(out, *pieces)
    view, start = np.asarray(out), 0
    for piece in pieces:
        view[..., start : start + piece.shape[-2], :] = np.asarray(piece)
        start += piece.shape[-2]
    return out
