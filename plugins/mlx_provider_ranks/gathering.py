"""Gathers a value of each rank by a collective."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np


def gathered(own: Any, group: mx.distributed.Group) -> list[Any]:
    """The JSON values of all ranks, in order. Every rank must call it at the same point."""
    raw = json.dumps(own).encode()
    sizes = _of_all(np.array([len(raw)]), group)[:, 0]
    padded = np.frombuffer(raw.ljust(int(sizes.max())), np.uint8)
    return [json.loads(bytes(row.tolist())) for row in _of_all(padded, group)]


def _of_all(own: np.ndarray[Any, Any], group: mx.distributed.Group) -> np.ndarray[Any, Any]:
    """(ranks, values)"""
    array = mx.array(own.astype(np.int32))[None]
    return np.array(mx.distributed.all_gather(array, group=group))
