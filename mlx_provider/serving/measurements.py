"""Stores measurements of models on this device in a file for the next load, and describes them."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from pydantic import TypeAdapter, ValidationError

from .. import __version__
from ..config import PREFIX, installed_version, state_folder
from ..protocol.health import FixedPasses, ModelStatus
from ..safe_open import read_own, replace_own
from ..upstream.runtime import KERNEL_FOLDER, active_blas
from .calibration import Measured
from .weights import Weights

log = logging.getLogger(__name__)

LARGEST = 2**20
"""Most bytes of the file."""
ENTRIES = 64
"""Entries (model and KV cache); the oldest is dropped first."""
UPSTREAM = ("mlx", "mlx-lm", "mlx-vlm")
FORMAT = 15
"""Version of the measurements and their method. Entries of other versions are not used."""
_FILE = TypeAdapter(dict[str, Measured])


@dataclass(frozen=True)
class Measurements:
    """All in one file. Belongs to the engine thread. Other processes may share the file."""

    _file: Path | None  # `None`: nothing is stored

    @classmethod
    def at(cls, setting: str, environ: Mapping[str, str] = os.environ) -> Measurements:
        """`setting`: `auto` (a file in the state folder), `off`, or a path."""
        if setting == "auto":
            return cls(state_folder(environ) / "measurements.json")
        return cls(None if setting == "off" else Path(setting).expanduser())

    def find(self, key: str) -> Measured | None:
        return self._read().get(key)

    def keep(self, key: str, measured: Measured) -> None:
        """Store for the next load, if it `lasts`. A file that cannot be written is only logged."""
        if self._file is None or not measured.lasts:
            return
        entries = {k: value for k, value in self._read().items() if k != key}
        newest = dict([*entries.items(), (key, measured)][-ENTRIES:])
        try:
            replace_own(self._file, _FILE.dump_json(newest))
        except OSError as error:
            log.warning("measurements cannot be stored in %s: %s", self._file, error.strerror)

    def _read(self) -> dict[str, Measured]:
        """Empty for a file that is missing, broken, too large, or another user's."""
        if self._file is None:
            return {}
        try:
            return _FILE.validate_json(read_own(self._file, LARGEST))
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            log.warning("%s is not used: %s", self._file, " ".join(str(error).split()))
            return {}


def circumstances(
    weights: Weights, kind: str, layouts: Sequence[str], plugins: Sequence[str]
) -> str:
    """A digest of all that a measurement depends on: model, KV cache, software and device."""
    device = mx.device_info()
    others = (PREFIX, KERNEL_FOLDER)  # a change of these changes no pass
    own = [n for n in os.environ if n.startswith("MLX_") and not n.startswith(others)]
    parts = (
        weights.info.fingerprint,
        (weights.plugin, weights.family, kind, *layouts),
        (FORMAT, __version__, *map(installed_version, UPSTREAM), *plugins),
        (mx.default_device(), device.get("device_name"), device.get("architecture")),
        (platform.platform(), active_blas(), sorted((n, os.environ[n]) for n in own)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def decoding(model: ModelStatus) -> str:
    """For people: how the rows of a model decode."""
    if model.reproducible is not None:
        return fixed_passes(model.reproducible)
    return batching(model.kv_layout, model.mixed_prefill, model.noise_floor)


def fixed_passes(passes: FixedPasses) -> str:
    """For people: the passes of a reproducible model."""
    shared = f"rows decode {passes.rows} to a pass, filled up"
    rows = shared if passes.rows > 1 else "each row decodes in a pass of its own"
    return f"reproducible: {rows}, prompts run in passes of {passes.tokens} tokens"


def batching(layout: str, mixed_prefill: bool, noise_floor: float) -> str:
    """For people: how rows decode in a layout."""
    if layout == "solo":
        return "rows decode alone"
    chunks = "with" if mixed_prefill else "apart from"
    noise = f"log-probabilities within {noise_floor:.2g} of alone"
    return f"rows decode together ({layout}), {chunks} chunks of prompts, {noise}"
