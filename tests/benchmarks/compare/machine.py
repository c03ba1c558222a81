"""What figures depend on besides the code."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("mlx-provider", "mlx", "mlx-lm", "mlx-vlm", "litellm", "transformers")


def versions() -> dict[str, str]:
    from mlx_provider.commands import installed_version

    found = {name: installed_version(name) for name in PACKAGES}
    return {"python": platform.python_version()} | {n: v for n, v in found.items() if v}


def machine() -> dict[str, Any]:
    """The machine, and its load at the start."""
    from mlx_provider_bench.report import surroundings

    about = surroundings("")
    del about["dtype"]
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    named = {"processor": processor(), "system": system, "memory_gb": round(memory() / 1e9, 1)}
    return named | about


def memory() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return _sysctl("machdep.cpu.brand_string") or platform.processor() or "unknown"


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(
            ["sysctl", "-n", name], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
