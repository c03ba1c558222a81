"""Models for this machine, by its memory and chip. Imports nothing heavy."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ..installed import installed_version

TABLE = Path(__file__).with_name("recommended.toml")
WIDE = {"Pro", "Max", "Ultra"}
"""Apple's chips with 150 to 800 GB/s; the others have 68 to 153."""
MOST_BYTES_PER_TOKEN = 3_000_000_000
"""Bytes of weights read per token above which a chip with little bandwidth is slow."""
CUDA = "mlx-cuda-13"
LIMIT = 5.0
Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Recommended:
    name: str
    weights: int
    """Bytes."""
    read: int
    """Bytes of weights per token."""
    memory: int
    """GB of a machine on which it leaves enough for a context."""
    why: str


@dataclass(frozen=True)
class Machine:
    chip: str
    memory: int
    """Bytes, shared by CPU and GPU or of the GPU alone."""
    wide: bool
    """Its memory is fast enough for weights of any size."""
    gpu: bool = True

    @property
    def label(self) -> str:
        return f"{self.chip}, {self.memory / 1e9:.0f} GB"


def table() -> tuple[date, list[Recommended]]:
    read = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return read["date"], [Recommended(**each) for each in read["model"]]


def two_for(machine: Machine, models: Sequence[Recommended]) -> list[Recommended]:
    """The best model that fits, and a second one; fewer if fewer fit. With little bandwidth, the
    second one is small. Without a GPU, both read few weights per token."""
    fitting = [each for each in models if each.memory * 1e9 <= machine.memory]
    first = [each for each in fitting if machine.gpu or each.read <= MOST_BYTES_PER_TOKEN][:1]
    small = [each for each in fitting if machine.wide or each.weights <= MOST_BYTES_PER_TOKEN]
    return [*first, *(each for each in small if each not in first)][:2]


def this_machine(run: Run | None = None, system: str = platform.system()) -> Machine:
    """`run`: returns a program's output, or an empty text."""
    run = run or _output
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if system == "Darwin":
        chip = run(["sysctl", "-n", "machdep.cpu.brand_string"]).strip() or "a Mac"
        return Machine(chip, host, wide=bool(WIDE & {*chip.split()}))
    if installed_version(CUDA):
        asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        name, _, memory = run(asked).partition("\n")[0].rpartition(",")
        if memory.strip().isdigit():
            return Machine(name, int(memory) * 2**20, wide=True)
    return Machine(_processor(), host, wide=False, gpu=False)


def _output(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            [*command], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "a CPU")
