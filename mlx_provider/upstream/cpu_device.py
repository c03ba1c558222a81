"""Whether MLX computes on a CPU that its build knows little of: any but Apple's (0.32.4)."""

from __future__ import annotations

import sys

import mlx.core as mx


def in_use() -> bool:
    """Whether the default device is a CPU outside of macOS: exponentials are slow there."""
    return sys.platform != "darwin" and mx.default_device().type == mx.DeviceType.cpu
