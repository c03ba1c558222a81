"""Variables of MLX that an engine sets before it imports MLX. Values of the user have precedence.

- `BUFFERS`: MLX 0.32.4 closes a Metal command buffer after 50 operations or 50 Mi elements on most
  chips (backend/metal/device.cpp), and `async_eval` waits when ten are in flight (transforms.cpp).
  A count of operations gives 254 buffers for a decode step of an 8B model with eight rows, and 36
  with the limits below. Each buffer costs about 20 microseconds. Published gains: from 58 to 91
  tokens per second for a 35B-A3B on an M1 Ultra (vllm-metal #637), 5 to 8 % (mlx #4521), none on an
  M5.
- `CUDA`: products of float32 on CUDA have the precision of TF32 otherwise (an error of 0.05 on an
  H100; 9 of 11 float32 comparisons failed, and with this value none of 40). MLX also keeps CUDA
  plans and graphs by the exact shapes of their arrays, and raises an error ("Cache thrashing")
  after twice as many new ones as it keeps, 512 for attention, counted from the start of the process
  (backend/cuda/lru_cache.h). Each length of a prompt is a new shape, so an engine would fail after
  some hundred prompts.
- `KERNELS`: CUDA kernels that MLX compiles take 40 seconds each. The default folder is temporary
  and is empty after a restart of the machine. MLX finds a compiled kernel by its name alone
  (backend/cuda/jit_module.cpp), so each version of MLX and each kind of card has its own folder.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

from ..installed import installed_version

BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"}
CUDA = {"MLX_ENABLE_TF32": "0", "MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}
KERNELS = "MLX_PTX_CACHE_DIR"
NAMES = {*BUFFERS, *CUDA, KERNELS}
CHIPS = re.compile(r"Apple M[1-4]\b")
"""Chips that benefit from `BUFFERS`."""
CARDS = Path("/proc/driver/nvidia/gpus")
"""Of NVIDIA's driver: a folder for each card, with a file `information` that has a line `Model`."""


def set_variables(
    state: Path | None,
    environ: MutableMapping[str, str] = os.environ,
    *,
    platform: str = sys.platform,
    chip: str | None = None,
    cards: Path = CARDS,
) -> None:
    """Set the variables that concern this system. Call it before `import mlx.core`.

    `state`: the folder of the user's state, if there is one. `chip`: the name of the processor; if
    unset, the name that macOS reports.
    """
    values: dict[str, str] = {}
    if platform == "darwin" and CHIPS.match(_chip() if chip is None else chip):
        values = BUFFERS
    elif platform == "linux":
        values = dict(CUDA)
        if state is not None:
            folder = state / "kernels" / installed_version("mlx") / _models(cards)
            values[KERNELS] = os.fspath(folder)
    for name, value in values.items():
        environ.setdefault(name, value)


def _models(cards: Path) -> str:
    """Names of the NVIDIA cards, as the name of a folder; empty where the driver lists none."""
    try:
        lines = [
            line
            for file in sorted(cards.glob("*/information"))
            for line in file.read_text().splitlines()
        ]
    except OSError:
        return ""
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("Model")}
    return re.sub(r"[^A-Za-z0-9]+", "-", " ".join(sorted(names))).strip("-")


def _chip() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
