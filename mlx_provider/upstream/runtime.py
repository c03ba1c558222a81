"""Sets up a process before it imports MLX: variables, C heap, scheduling policy and BLAS, in the
order of `server/run.py`. The variables are MLX's; values that the user has set stay.

- `BUFFERS`: MLX 0.32.4 closes a Metal command buffer after 50 operations or 50 Mi elements on most
  chips (backend/metal/device.cpp), and waits when ten are in flight (transforms.cpp). A decode step
  of an 8B model with eight rows fills 254 buffers, and 36 with the limits below.
- `CUDA`: without it, float32 products have the precision of TF32, and MLX raises an error ("Cache
  thrashing") after some hundred prompts: it keeps 512 plans of attention by the exact shapes of
  arrays, and each length of a prompt is a new shape (backend/cuda/lru_cache.h).
- `KERNEL_FOLDER`: CUDA kernels that MLX compiles take 40 seconds each, and the default folder is
  temporary. MLX finds a compiled kernel by its name alone (backend/cuda/jit_module.cpp), so each
  version of MLX and each kind of card has its own folder.

MLX 0.32.4 allocates the arrays of its CPU device from the C heap. By default, glibc returns its top
to the kernel when a few MB are free, so new arrays cause page faults again, and merges all small
free blocks ("fast bins") when a block above 64 KiB is freed; a decode step frees thousands."""

import ctypes
import ctypes.util
import importlib
import importlib.util
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..config import installed_version
from ..cores import cores
from ..errors import EngineUnavailable, NotInstalled

MAX_FREE = 1 << 30
"""Bytes of freed memory that the process keeps, as MLX's buffer cache does on a GPU."""
MMAP_LEAST = 32 << 20
"""Bytes from which an array is not on the heap: the largest value that every glibc accepts."""
M_MXFAST, M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = 1, -1, -3, -8
HEAP = {M_TRIM_THRESHOLD: MAX_FREE, M_ARENA_MAX: 1, M_MXFAST: 0, M_MMAP_THRESHOLD: MMAP_LEAST}
BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"}
CUDA = {"MLX_ENABLE_TF32": "0", "MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
KERNEL_FOLDER = "MLX_PTX_CACHE_DIR"
VARIABLES = {*BUFFERS, *CUDA, KERNEL_FOLDER}
CHIP = ("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string")
CHIPS = re.compile(r"Apple M[1-4]\b")
"""Chips that benefit from `BUFFERS`."""
CARDS = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has here a folder for each card; its file `information` has a line `Model`."""


def quiet_transformers() -> None:
    """Let transformers log only errors, unless the user has set its level. Call it before its
    import. It warns about missing PyTorch and unknown keys of a `config.json` (transformers
    5.23, `utils/logging.py`)."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def keep_file_limit() -> Iterator[None]:
    """Keep the limit of open files, which the import of mlx_lm lowers (mlx_lm/utils.py 0.32.2). To
    restore it afterwards would need a privilege: the hard limit is lowered, too."""
    original = resource.setrlimit

    def others_only(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE:
            original(kind, limits)

    resource.setrlimit = others_only
    try:
        yield
    finally:
        resource.setrlimit = original


def configure_heap() -> bool:
    """Keep freed memory for the next arrays, merge small free blocks at once, and use one heap.
    Only for an engine process. Returns whether the C library has these settings; none on macOS.

    `malloc_trim` returns the top of the main heap only: with more heaps, each thread that has
    decoded an image would keep up to 64 MB."""
    glibc = _glibc()
    accepted = [] if glibc is None else [glibc.mallopt(*setting) for setting in HEAP.items()]
    return bool(accepted) and all(accepted)


def trim_heap() -> None:
    """Return all free memory to the system, after rare and large allocations. No effect on macOS,
    which returns large blocks when they are freed."""
    if (glibc := _glibc()) is not None:
        glibc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None


def use_batch_policy() -> None:
    """Let this thread, and the threads that it starts later, not preempt others when they wake up:
    MLX's CPU device wakes a thread for each operation (mlx 0.32.4, `mlx/scheduler.h`). Call it
    before the first use of MLX in the thread. No effect if the system refuses the policy."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def set_variables(
    state: Path | None,
    environ: MutableMapping[str, str] = os.environ,
    *,
    platform: str = sys.platform,
    chip: str | None = None,
    cards: Path = CARDS,
) -> None:
    """Set the variables that concern this system. Call it before `import mlx.core`. `state`: the
    folder of the user's state, for kernels. `chip`: the processor's name; `None`: as macOS says."""
    values: dict[str, str] = {}
    if platform == "darwin" and CHIPS.match(output_of(CHIP) if chip is None else chip):
        values = BUFFERS
    elif platform == "linux":
        values = dict(CUDA)
        if state is not None:
            folder = state / "kernels" / installed_version("mlx") / _card_names(cards)
            values[KERNEL_FOLDER] = os.fspath(folder)
    for name, value in values.items():
        environ.setdefault(name, value)


def _card_names(cards: Path) -> str:
    """Names of the NVIDIA cards, as the name of a folder; empty where the driver lists none."""
    try:
        texts = [file.read_text() for file in cards.glob("*/information")]
    except OSError:
        return ""
    names = {name.strip() for text in texts for name in re.findall("(?m)^Model.*?:(.*)", text)}
    return re.sub(r"[^A-Za-z0-9]+", "-", " ".join(sorted(names))).strip("-")


def output_of(command: Sequence[str]) -> str:
    """What a command prints; empty if it fails or takes 5 seconds."""
    try:
        return subprocess.check_output([*command], stderr=subprocess.DEVNULL, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return ""


MAC = "pip install mlx (needs an Apple silicon Mac and a native arm64 Python)"
LINUX = "pip install '.[cpu]' in the clone of mlx-provider, or '.[cuda13]' with an NVIDIA GPU"
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

_loaded: list[str] = []  # the path of the library that `preload_blas` loaded
CORE_NAME = """import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.openblas_get_corename.restype = ctypes.c_char_p
print(library.openblas_get_corename().decode())"""
KERNELS = {"avx512vl": "SkylakeX", "avx2": "Haswell"}
"""Kernels of OpenBLAS by the instructions that they need, best first."""
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def preload_blas() -> str:
    """Load the first usable optimised BLAS before `import mlx.core`. Returns the description of the
    active one. No effect on macOS, or after MLX is imported."""
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        # OpenBLAS ignores the quota of a container: too many spinning threads are slower than one
        if not any(os.environ.get(name) for name in THREAD_VARIABLES):
            os.environ["OPENBLAS_NUM_THREADS"] = str(cores())
        # after a product, its threads spin for 2^20 ticks (0.4 ms), not 2^26, until the next step
        os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
        any(_load(path) for path in _candidates())
    return active_blas()


def active_blas() -> str:
    """A description, for people, of the BLAS that MLX uses or will use."""
    if sys.platform == "darwin":
        return "Accelerate"
    process = ctypes.CDLL(None)
    if not hasattr(process, SYMBOL):
        return "bundled with MLX (slow for float32 on a CPU)"
    if not hasattr(process, "openblas_get_config"):
        return " ".join(["BLAS", *_loaded])
    process.openblas_get_config.restype = ctypes.c_char_p
    return " ".join([*process.openblas_get_config().decode().split()[:2], *_loaded])


def _candidates() -> Iterator[str]:
    """Libraries to try, best first: the system's, then the one in OpenCV's wheel."""
    for name in ("openblas", "blis"):
        if found := ctypes.util.find_library(name):
            yield found
    opencv = importlib.util.find_spec("cv2")
    if opencv is None or opencv.origin is None:
        return
    site = Path(opencv.origin).parent.parent
    for folder in ("opencv_python.libs", "opencv_python_headless.libs"):
        yield from sorted(str(path) for path in (site / folder).glob("libopenblas*.so*"))


def _choose_kernels(path: str) -> None:
    """Name OpenBLAS's kernels by the processor's instructions, where it would take those of 2004,
    as for a processor that is newer than the library. With 0.3.15 on an Intel Xeon of 2023, a large
    product takes five times as long, and a row's result depends on the number of rows."""
    if output_of((sys.executable, "-I", "-S", "-c", CORE_NAME, path)).strip() != "Prescott":
        return
    words = set(Path("/proc/cpuinfo").read_text().split())
    for name in [name for flag, name in KERNELS.items() if flag in words]:
        os.environ.setdefault("OPENBLAS_CORETYPE", name)


def _load(path: str) -> bool:
    with suppress(OSError):
        _choose_kernels(path)
        if hasattr(ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL), SYMBOL):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            _loaded[:] = [f"({path})"]
            return True
    return False
