"""NumPy's threads beside those of MLX."""

from __future__ import annotations

import functools


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
