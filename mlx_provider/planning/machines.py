"""Machines by name or by their figures, and what MLX may use of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..engine.memory import RECOMMENDED_SHARE
from ..errors import BadRequest
from ..gateway.models import MEMORY_SHARE
from ..testing.device_curves import CHIPS, Chip
from . import units

REACHED = 0.9
"""Of the bandwidth that a maker publishes. Assumed; an M3 Max reaches 0.97, an M5 Max 0.91."""
WORKING_SET = 0.75
"""Of a Mac's memory, that Metal recommends unless told otherwise. 0.84 was measured on 128 GB
(antirez/ds4, pull request 893), 0.74 on 16 GB (AlexsJones/llmfit, pull request 754)."""
MOST = 64
"""Machines of a group; more is a slip of the pen."""
_M3_MAX = CHIPS["M3 Max"]
_CORES = 40
"""GPU cores of the M3 Max that was measured."""
_PUBLISHED = {
    "m2-max": (400e9, 38),
    "m2-ultra": (800e9, 76),
    "m3-ultra": (819e9, 80),
    "m4-pro": (273e9, 20),
    "m4-max": (546e9, 40),
}
"""Apple's bandwidth and GPU cores, each chip with all its cores."""
FORM = (
    "machine: name a chip and its memory (`m4-max-128gb`), or give memory and bandwidth "
    "(`64GB:400GB/s`), and how many (`m4-max-128gb x2`); chips: "
)


@dataclass(frozen=True)
class Machine:
    """One machine of a group."""

    name: str
    memory: int
    """Bytes, all of it."""
    chip: Chip
    basis: str
    """Where its figures are from."""

    @property
    def room(self) -> int:
        """Bytes for weights and requests: what the engine takes by default, less what its passes
        need."""
        return int(MEMORY_SHARE * RECOMMENDED_SHARE * WORKING_SET * self.memory)


def known_chips() -> dict[str, tuple[Chip, str]]:
    """Chips of Macs by name, and where their figures are from."""
    measured = "bandwidth and compute as in this project's device curves"
    macs = {name: chip for name, chip in CHIPS.items() if name.startswith("M")}
    found = {name.lower().replace(" ", "-"): (chip, measured) for name, chip in macs.items()}
    return {name: _by_cores(*figures) for name, figures in _PUBLISHED.items()} | found


def _by_cores(published: float, cores: int) -> tuple[Chip, str]:
    share = cores / _CORES
    chip = Chip(REACHED * published, share * _M3_MAX.products, share * _M3_MAX.attention)
    told = f"Apple's {published / 1e9:.0f} GB/s, {REACHED:.0%} of it; compute of an M3 Max by core"
    return chip, f"{told} (assumed)"


def machines(text: str) -> list[Machine]:
    """Those of a list such as `m3-ultra-256gb, 2x64GB:400GB/s`. Raises `BadRequest`."""
    found = [machine for each in text.split(",") for machine in _several(each.strip())]
    if len(found) > MOST:
        raise BadRequest(f"{len(found)} machines are more than {MOST}", param="machines")
    return found


def _several(text: str) -> list[Machine]:
    before = re.fullmatch(r"(\d+)\s*[x×*]\s*(.+)", text)
    behind = re.fullmatch(r"(.+?)\s*[x×*]\s*(\d+)", text)
    count, body = 1, text
    if before:
        count, body = int(before[1][:6]), before[2]
    elif behind:
        count, body = int(behind[2][:6]), behind[1]
    if not 0 < count <= MOST:
        raise BadRequest(f"{text!r}: from 1 to {MOST} machines", param="machines")
    return [_machine(body)] * count


def _machine(text: str) -> Machine:
    return _by_figures(text) if ":" in text else _by_name(text)


def _by_name(text: str) -> Machine:
    chips = known_chips()
    name, _, memory = text.lower().replace(" ", "-").rpartition("-")
    if name not in chips:
        raise BadRequest(f"{text!r} is no known {FORM}{', '.join(sorted(chips))}", param="machines")
    chip, basis = chips[name]
    return Machine(f"{name}-{memory}", _memory(memory), chip, basis)


def _by_figures(text: str) -> Machine:
    memory, bandwidth, *rest = (part.strip() for part in text.split(":"))
    if len(rest) > 1:
        raise BadRequest(f"{text!r} is no {FORM}{', '.join(sorted(known_chips()))}")
    read = REACHED * units.positive(
        units.rate(bandwidth), bandwidth, "bandwidth, such as `400GB/s`", "machines"
    )
    computed = _M3_MAX.products * read / _M3_MAX.bytes
    if rest:
        told = "compute, such as `11.5TFLOPS`"
        computed = units.positive(units.products(rest[0]), rest[0], told, "machines")
    chip = Chip(read, computed, computed * _M3_MAX.attention / _M3_MAX.products)
    compute = "compute as given" if rest else "compute of an M3 Max by bandwidth (assumed)"
    basis = f"{REACHED:.0%} of the bandwidth given (assumed); {compute}"
    return Machine(f"{memory}:{bandwidth}", _memory(memory), chip, basis)


def _memory(text: str) -> int:
    return int(units.positive(units.memory(text), text, "memory, such as `64GB`", "machines"))
