"""NumPy's threads beside those of MLX."""

from __future__ import annotations

import functools


@functools.cache
def numpy_alone() -> None:
    """From now on, NumPy computes each product in the calling thread only. The threads of its BLAS
    and of MLX's BLAS spin while they wait, and would take the cores from each other: a chunk of 20
    ms then sometimes takes 180."""
    from threadpoolctl import ThreadpoolController

    own = [one.filepath for one in ThreadpoolController().lib_controllers]
    bundled = [path for path in own if "numpy.libs" in path]
    ThreadpoolController().select(filepath=bundled).limit(limits=1)
