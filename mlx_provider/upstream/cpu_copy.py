"""Joining arrays on a CPU: by NumPy, into one of MLX's.

MLX's CPU build outside of macOS (0.32.4) copies element by element when it joins arrays along an
inner axis, at 2-3 GB/s where a plain copy reaches 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from . import cpu_device


def joined(runs: Sequence[Sequence[mx.array]], slacks: Sequence[int]) -> list[mx.array]:
    """Each run's pieces, one after another along their token axis (-2), and its slack of zeros.

    The pieces of a run have the same dtype and the same other axes; `slacks`: tokens, by run.
    The results share no memory with them; on a CPU they are evaluated.
    """
    mx.eval(runs)  # before the zeros, behind which they would wait
    out = [_begun(*each) for each in zip(runs, slacks, strict=True)]
    return [
        _concatenated(run, slack) if blank is None else _filled(blank, run)
        for blank, run, slack in zip(out, runs, slacks, strict=True)
    ]


def _begun(pieces: Sequence[mx.array], slack: int) -> mx.array | None:
    """Zeros for all of a run, which MLX's thread writes while NumPy fills those before them."""
    first = pieces[0]
    if not cpu_device.in_use() or first.dtype == mx.bfloat16:  # NumPy has no bfloat16
        return None
    tokens = sum(piece.shape[-2] for piece in pieces)
    blank = mx.zeros((*first.shape[:-2], tokens + slack, first.shape[-1]), dtype=first.dtype)
    mx.async_eval(blank)  # type: ignore[no-untyped-call]
    return blank


def _filled(blank: mx.array, pieces: Sequence[mx.array]) -> mx.array:
    view, start = np.asarray(blank), 0
    for piece in pieces:
        view[..., start : start + piece.shape[-2], :] = np.asarray(piece)
        start += piece.shape[-2]
    return blank


def _concatenated(pieces: Sequence[mx.array], slack: int) -> mx.array:
    first = pieces[0]
    zeros = mx.zeros((*first.shape[:-2], slack, first.shape[-1]), dtype=first.dtype)
    return mx.contiguous(mx.concatenate([*pieces, zeros] if slack else [*pieces], axis=-2))
