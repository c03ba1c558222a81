"""Whether MLX can be imported, and the BLAS that its CPU build calls on Linux: the wheel (`mlx-cpu`
0.32) contains the slow reference (6 GFLOP/s in float32, an optimised BLAS 213). The dynamic linker
prefers symbols of a library opened with `RTLD_GLOBAL` before `import mlx.core`."""

import ctypes
import ctypes.util
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..cores import cores
from ..errors import EngineUnavailable, NotInstalled

MAC = "pip install mlx (needs an Apple silicon Mac and a native arm64 Python)"
LINUX = (
    "pip install 'mlx-provider[cpu]' for a machine without a GPU, "
    "or 'mlx-provider[cuda13]' for an NVIDIA GPU"
)
"""On Linux, the package `mlx` has no library."""


def require_mlx() -> None:
    """Import `mlx.core`. Raises `NotInstalled` with the package to install, and `EngineUnavailable`
    if the GPU has no memory for it, which MLX tells in an `ImportError`, too."""
    try:
        importlib.import_module("mlx.core")
    except ImportError as error:
        if "cudaMalloc" in str(error) or "out of memory" in str(error):
            raise EngineUnavailable(
                f"the memory of the GPU is full ({error}): end the processes that use it, which "
                "nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
            ) from None
        remedy = LINUX if sys.platform != "darwin" else MAC
        raise NotInstalled(f"MLX cannot be imported ({error}): {remedy}") from None


SYMBOL = "cblas_sgemm"
"""The symbol that libmlx calls. Builds with prefixed names (numpy, scipy) are not usable."""

_loaded: list[str] = []
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def preload() -> str:
    """Load the first usable optimised BLAS before `import mlx.core`. Returns the description of the
    active one. No effect on macOS, or after MLX is imported."""
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        # OpenBLAS ignores the quota of a container: too many spinning threads are slower than one
        if not any(os.environ.get(name) for name in THREAD_VARIABLES):
            os.environ["OPENBLAS_NUM_THREADS"] = str(cores())
        any(_load(path) for path in candidates())
    return active()


def active() -> str:
    if sys.platform == "darwin":
        return "Accelerate"
    everywhere = ctypes.CDLL(None)
    if not hasattr(everywhere, SYMBOL):
        return "bundled with MLX (slow for float32 on a CPU)"
    return " ".join([_version(everywhere), *_loaded])


def candidates() -> Iterator[str]:
    """Libraries to try, best first: the system's, then the one in OpenCV's wheel."""
    for name in ("openblas", "blis"):
        found = ctypes.util.find_library(name)
        if found:
            yield found
    opencv = importlib.util.find_spec("cv2")
    if opencv is None or opencv.origin is None:
        return
    site = Path(opencv.origin).parent.parent
    for folder in ("opencv_python.libs", "opencv_python_headless.libs"):
        yield from sorted(str(path) for path in (site / folder).glob("libopenblas*.so*"))


def _load(path: str) -> bool:
    try:
        if not hasattr(ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL), SYMBOL):
            return False
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    _loaded[:] = [f"({path})"]
    return True


def _version(library: ctypes.CDLL) -> str:
    if not hasattr(library, "openblas_get_config"):
        return "BLAS"
    library.openblas_get_config.restype = ctypes.c_char_p
    return " ".join(library.openblas_get_config().decode().split()[:2])
