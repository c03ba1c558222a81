"""Selects the prompt tokens to keep: the chunks with the highest scores. Imports no mlx."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 32
"""Tokens kept or left out together: a single token means little without its neighbours."""
SMOOTHING = 13
"""Width of the moving average over the scores, in tokens."""
FIRST = 32
"""First tokens of the prompt that are always kept, because they get much of the attention."""
LAST = 128
"""The same at its end: the question, and the start of the reply."""


class Nonsense(ValueError):
    """Unusable scores."""


def kept_places(scores: Any, tokens: int, share: float, window: int = 0) -> list[int]:
    """Ascending places of the tokens to keep: about `share` of them, including both ends. `scores`:
    (tokens,); `window`: last tokens to keep in addition, because layers with a window must hold all
    tokens within it. Raises `Nonsense`."""
    means = chunk_scores(scores, tokens)
    starts = np.arange(0, tokens, CHUNK)
    always = kept_anyway(tokens, window)
    order = np.lexsort((starts, -means, ~always))
    whole = window // CHUNK
    wanted = max(int(always.sum()), whole + round(share * (len(starts) - whole)))
    keep = np.zeros(len(starts), bool)
    keep[order[:wanted]] = True
    places: list[int] = np.flatnonzero(np.repeat(keep, CHUNK)[:tokens]).tolist()
    return places


def chunk_scores(scores: Any, tokens: int) -> NDArray[np.float64]:
    """Mean of the smoothed scores (tokens,) of each chunk, (chunks,). Raises `Nonsense`."""
    found = _checked(scores, tokens)
    smooth = np.convolve(_padded(found, SMOOTHING // 2), np.full(SMOOTHING, 1 / SMOOTHING), "valid")
    starts = np.arange(0, tokens, CHUNK)
    means: NDArray[np.float64] = np.add.reduceat(smooth, starts)
    return means / (np.minimum(starts + CHUNK, tokens) - starts)


def kept_anyway(tokens: int, window: int = 0) -> NDArray[np.bool_]:
    starts = np.arange(0, tokens, CHUNK)
    ends: NDArray[np.bool_] = (starts < FIRST) | (starts + CHUNK > tokens - max(LAST, window))
    return ends


def _checked(scores: Any, tokens: int) -> NDArray[np.float64]:
    found = np.asarray(scores, dtype=np.float64)
    if found.shape != (tokens,):
        raise Nonsense(f"scores of shape {found.shape} for {tokens} tokens")
    if not np.isfinite(found).all():
        raise Nonsense("scores that are not finite numbers")
    return found


def _padded(scores: NDArray[np.float64], each: int) -> NDArray[np.float64]:
    return np.pad(scores, each, mode="edge")
