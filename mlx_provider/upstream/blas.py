"""The BLAS that MLX's CPU build calls on Linux.

The Linux wheel of MLX (`mlx-cpu` 0.32) carries the reference BLAS. Symbols of a library that
was opened with `RTLD_GLOBAL` before `import mlx.core` come first when libmlx is bound, so that
an optimised BLAS takes the place of the reference one: float32 runs 6 -> 213 GFLOP/s here.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..cores import cores

SYMBOL = "cblas_sgemm"
"""The plain name that libmlx calls; builds with prefixed names (numpy, scipy) do not serve."""

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def preload() -> str:
    """Load the first optimised BLAS that serves, and say which one runs.

    Call it before `import mlx.core`. It has no effect on macOS and once MLX is imported.
    """
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        _bound_threads()
        any(_load(path) for path in candidates())
    return active()


def active() -> str:
    """The BLAS that MLX is bound to in this process, in words for a person."""
    if sys.platform == "darwin":
        return "Accelerate"
    everywhere = ctypes.CDLL(None)
    if not hasattr(everywhere, SYMBOL):
        return "bundled with MLX (slow for float32 on a CPU)"
    return f"{_version(everywhere)} ({_home(everywhere)})"


def candidates() -> Iterator[str]:
    """Libraries to try, best first: the system's, then the one that OpenCV's wheel carries."""
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
    """Open the library for everybody, if it exports the plain symbol."""
    try:
        if not hasattr(ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL), SYMBOL):
            return False
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return False
    return True


def _bound_threads() -> None:
    # OpenBLAS counts the machine's cores and ignores a container's quota; too many threads
    # that spin under a quota are slower than one.
    if not any(os.environ.get(name) for name in THREAD_VARIABLES):
        os.environ["OPENBLAS_NUM_THREADS"] = str(cores())


def _version(library: ctypes.CDLL) -> str:
    if not hasattr(library, "openblas_get_config"):
        return "BLAS"
    library.openblas_get_config.restype = ctypes.c_char_p
    words = library.openblas_get_config().decode().split()
    return " ".join(words[:2])


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _home(library: ctypes.CDLL) -> str:
    """The file that the symbol was found in."""
    info = _SymbolInfo()
    found = library.dladdr(ctypes.cast(library[SYMBOL], ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file) if found and info.file else "unknown file"
