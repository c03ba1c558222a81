"""The size of a Metal command buffer.

MLX 0.32.4 closes one after 50 operations or 50 Mi elements on most chips
(backend/metal/device.cpp), and `async_eval` waits when ten are in flight (transforms.cpp). By count
of operations, a decode step of an 8B model with eight rows takes 254 buffers, and 36 with the
limits below, at about 20 microseconds each. Published gains: from 58 to 91 tokens per second for a
35B-A3B on an M1 Ultra (vllm-metal #637), 5 to 8 % (mlx #4521), none on an M5.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import MutableMapping

LIMITS = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"}
"""Variables of MLX. Values of the user have precedence."""
CHIPS = re.compile(r"Apple M[1-4]\b")


def enlarge(environ: MutableMapping[str, str] = os.environ, chip: str | None = None) -> None:
    """Set `LIMITS` on chips that benefit. Call it before `import mlx.core`. `chip`: the name of the
    processor; if unset, the name that macOS reports. No effect elsewhere."""
    if CHIPS.match(_chip() if chip is None else chip):
        for name, value in LIMITS.items():
            environ.setdefault(name, value)


def _chip() -> str:
    if sys.platform != "darwin":
        return ""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout
