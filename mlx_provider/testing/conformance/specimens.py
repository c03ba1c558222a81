"""A family's tiny checkpoints in the formats of users."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...engine.execution import solo_rows
from ...engine.execution.probe import Probe, probe
from ...families.checkpoint import read_json
from ...records import LoadedModel, LoadOptions, ModelFamily
from ...registry import PluginRegistry
from ...serving.kernels import equip
from ..tiny import build
from ..tiny.configs import FAMILIES
from .check import NotApplicable

FORMATS = ("float32", "bfloat16", "4 bit")
GROUP = 32
"""Values that share a scale in four bits."""
HARMLESS = 1e-3
"""Difference of a log-probability in float32 that is never an error."""
SHARE = 0.15
"""Share of the difference that another context makes: rounding in 16 and 4 bits stays below half of
it, an error comes near to the whole."""
ONE = 2.0
"""Factor by which one token's log-probability may differ more than the mean of many."""
Write = Callable[[Path], object]


@dataclass
class Checkpoint:
    family: ModelFamily
    label: str
    write: Write
    registry: PluginRegistry
    new_folder: Callable[[], Path]
    specimens: dict[str, Specimen] = field(default_factory=dict)

    @cached_property
    def folder(self) -> Path:
        folder = self.new_folder()
        self.write(folder)
        return folder

    def specimen(self, kept_in: str) -> Specimen:
        if kept_in not in self.specimens:
            self.specimens[kept_in] = Specimen(self, kept_in)
        return self.specimens[kept_in]


class Specimen:
    def __init__(self, checkpoint: Checkpoint, kept_in: str) -> None:
        self.checkpoint = checkpoint
        self.kept_in = kept_in

    @property
    def family(self) -> ModelFamily:
        return self.checkpoint.family

    @property
    def exact(self) -> bool:
        """Whether tokens must be equal, not only equally likely."""
        return self.kept_in == "float32"

    @cached_property
    def folder(self) -> Path:
        if self.exact:
            return self.checkpoint.folder
        folder = self.checkpoint.new_folder()
        halved(self.checkpoint.folder, folder)
        return folder

    @cached_property
    def model(self) -> LoadedModel:
        """Equipped with the engine's kernels."""
        model = self.family.load(self.folder, LoadOptions())
        if self.kept_in == "4 bit":
            whole: Any = model.model
            if not isinstance(whole, nn.Module):
                raise NotApplicable("its model is no mlx.nn.Module that could be quantised")
            quantise(getattr(whole, "language_model", whole))
        equip(model, self.checkpoint.registry)
        if not self.exact:
            computed_here(model)
        return model

    @cached_property
    def probe(self) -> Probe:
        return probe(self.model, self.model.make_cache, self.model.kv_layouts)

    @cached_property
    def tolerance(self) -> float:
        floor = solo_rows.MULTIPLE * self.probe.noise_floor
        return max(HARMLESS if self.exact else ONE * self.bound, floor)

    @cached_property
    def bound(self) -> float:
        """Difference of likely tokens (root mean square) between two ways to the same logits: a
        small share of what another context makes."""
        tokens = self.tokens(solo_rows.STEPS + 8, 5)
        cache = solo_rows.prefilled(self.model, self.model.make_cache, tokens[:8])
        logits = solo_rows.decoded(self.model, cache, tokens[8:], 8)
        contexts = [solo_rows.spread(a, b) for a, b in itertools.pairwise(logits)]
        reach = sum(contexts) / len(contexts)
        return HARMLESS if self.exact else max(solo_rows.HARMLESS["low"], SHARE * reach)

    def tokens(self, length: int, word: int) -> list[int]:
        """Ids without stop tokens. With equal `word`, they begin equally."""
        return solo_rows.some_tokens(self.model, length, word)


def computed_here(model: LoadedModel) -> None:
    """Raise `NotApplicable` where this device has no kernel for a format (MLX 0.32 on a CPU: the
    experts of bfloat16)."""
    try:
        solo_rows.prefilled(model, model.make_cache, solo_rows.some_tokens(model, 3, 0))
    except RuntimeError as error:
        if "only supports" in str(error):
            raise NotApplicable(f"this device cannot compute it: {error}") from None
        raise


def quantise(model: nn.Module) -> None:
    """Four bits, as by converters. Raises `NotApplicable` for layers that have no such form (mlx-lm
    0.32's own linear layers of some architectures)."""
    try:
        nn.quantize(model, group_size=GROUP, bits=4, class_predicate=_divisible)
    except TypeError as error:
        raise NotApplicable(f"its layers have no form in four bits: {error}") from None


def _divisible(path: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % GROUP == 0


def halved(folder: Path, other: Path) -> None:
    """With weights in bfloat16."""
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            weights: Any = mx.load(str(path))
            cast = {name: _in_half(name, value) for name, value in weights.items()}
            mx.save_safetensors(str(other / path.name), cast, metadata={"format": "mlx"})
        elif path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    config = read_json(other / "config.json") | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}
    (other / "config.json").write_text(json.dumps(config))


def _in_half(name: str, value: mx.array) -> mx.array:
    """Logarithms of decays keep their dtype, as in converters."""
    floats = mx.issubdtype(value.dtype, mx.floating) and not name.endswith("A_log")
    return value.astype(mx.bfloat16) if floats else value


def known_checkpoints(family: ModelFamily, registry: PluginRegistry) -> Mapping[str, Write]:
    found: dict[str, Write] = {}
    for tiny in FAMILIES:
        config = dict(tiny.config(defaultdict(int)))
        if family.matches(config) and registry.family_for(config)[0].name == family.name:
            found[tiny.name] = partial(build, family=tiny.name)
    return found
