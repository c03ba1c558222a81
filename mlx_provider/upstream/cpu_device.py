"""A CPU that MLX's build knows little of (any but Apple's, 0.32.4), and NumPy beside it there."""

from __future__ import annotations

import functools
import sys

import mlx.core as mx


def in_use() -> bool:
    """Whether the default device is a CPU outside of macOS: exponentials are slow there."""
    return sys.platform != "darwin" and mx.default_device().type == mx.DeviceType.cpu


@functools.cache
def numpy_alone() -> None:
    """Let each of NumPy's products be of the calling thread alone, from now on.

    The threads of its BLAS (the one in its wheel) and those of MLX's wait for work by spinning,
    and would keep the cores from each other: a chunk of 20 ms then takes 180 now and then.
    """
    from threadpoolctl import ThreadpoolController

    own = [one.filepath for one in ThreadpoolController().lib_controllers]
    bundled = [path for path in own if "numpy.libs" in path]
    ThreadpoolController().select(filepath=bundled).limit(limits=1)
