"""The tensors of an MTP head in a checkpoint, as a head of our own names them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from mlx_provider.families.checkpoint import read_json

Tensors = dict[str, mx.array]

MODEL_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
HEAD = re.compile(r"^(?:(?:language_)?model\.)*mtp\.(?=\w)")
"""How names of its tensors begin: in the makers' files and in those of converters."""
KNOWN = re.compile(
    r"fc\.\w+|norm\.weight|pre_fc_norm_(?:embedding|hidden)\.weight|layers\.0\..+"
)
FORMS = ("weight", "bias", "scales", "biases", "gate_up_proj", "down_proj")
"""Last parts of names: experts may lie in one tensor without a name of its own."""
EXPERT = re.compile(r"(?P<mlp>.+)\.experts\.(?P<index>\d+)\.(?P<rest>.+)")
FUSED = re.compile(r"(?P<mlp>.+)\.experts\.(?P<part>gate_up|down)_proj(?:\.(?P<form>\w+))?")
OUTSIDE = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
"""Norms before the head's layer."""
HALF = 0.5
"""Between the means of gains that were stored with and without the one that is added to them."""


def problem(folder: Path) -> str:
    """Why the folder has no head that can be read, in one line; empty: it has."""
    names = {name for each in _files(folder).values() for name in each.values()}
    if not names:
        return "no MTP head in the checkpoint"
    config = read_json(folder / "config.json")
    kinds = {each.get("model_type") for each in (config, config.get("text_config") or {})}
    if kinds.isdisjoint(MODEL_TYPES):
        return f"its MTP head is not one of Qwen3.5 or Qwen3-Next, but of {config['model_type']}"
    strange = [n for n in names if not KNOWN.fullmatch(n) or n.rsplit(".", 1)[-1] not in FORMS]
    return f"its MTP head is stored in a form that is not known ({min(strange)})" if strange else ""


def read(folder: Path, dtype: mx.Dtype) -> Tensors:
    """The head's tensors, gains as `mlx.nn.RMSNorm` has them; those in float are of `dtype`.

    Nothing else of the files is read, and of the head only its gains.
    """
    found: Tensors = {}
    for path, names in _files(folder).items():
        stored: Any = mx.load(str(path))
        own = {short: stored[name] for name, short in names.items()}
        floats = {n: _cast(value, dtype) for n, value in own.items()}
        found |= _gains(floats, raw=_format(path) == "pt")
    return _together(found)


def _files(folder: Path) -> dict[Path, dict[str, str]]:
    """Of each file with a part of the head: names of its tensors, as stored and as ours."""
    found = {path: _names(path) for path in sorted(folder.glob("*.safetensors"))}
    return {path: names for path, names in found.items() if names}


def _names(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {n: HEAD.sub("", n) for n in file.keys() if HEAD.match(n)}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}  # loading the model has told what is wrong with it, or it is not of the model


def _format(path: Path) -> str | None:
    with safe_open(path, framework="numpy") as file:
        return (file.metadata() or {}).get("format")


def _cast(value: mx.array, dtype: mx.Dtype) -> mx.array:
    return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value


def _gains(tensors: Tensors, *, raw: bool) -> Tensors:
    """Makers store gains of norms less one (`raw`), and most converters add it again; some have
    left it out for the head, or for its layer alone, which the values tell.

    A layer's gains are about one. Those before the layer may be small, but are not negative: in
    Qwen3.6-35B they are 0.27 and 0.49.
    """
    means = {n: float(mx.mean(v).item()) for n, v in tensors.items() if _is_gain(n, v)}
    layer = [mean for name, mean in means.items() if name.startswith("layers.")]
    layer_raw = bool(layer) and sum(layer) / len(layer) < HALF

    def lacks_one(name: str) -> bool:
        if raw or means[name] < 0:
            return True
        return layer_raw if name in OUTSIDE or name.startswith("layers.") else means[name] < HALF

    return {n: v + 1 if n in means and lacks_one(n) else v for n, v in tensors.items()}


def _is_gain(name: str, value: mx.array) -> bool:
    return value.ndim == 1 and name.endswith("norm.weight") or name in OUTSIDE


def _together(tensors: Mapping[str, mx.array]) -> Tensors:
    """Experts as one tensor for each of their three matrices."""
    found: Tensors = {}
    apart: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name, value in tensors.items():
        if match := EXPERT.fullmatch(name):
            apart[f"{match['mlp']}.switch_mlp.{match['rest']}"][int(match["index"])] = value
        elif match := FUSED.fullmatch(name):
            found |= _split(match["mlp"], match["part"], match["form"] or "weight", value)
        else:
            found[name] = value
    stacked = {n: mx.stack([own[i] for i in sorted(own)]) for n, own in apart.items()}
    return found | stacked


def _split(mlp: str, part: str, form: str, value: mx.array) -> Tensors:
    if part == "down":
        return {f"{mlp}.switch_mlp.down_proj.{form}": value}
    gate, up = mx.split(value, 2, axis=-2)
    return {
        f"{mlp}.switch_mlp.gate_proj.{form}": gate,
        f"{mlp}.switch_mlp.up_proj.{form}": up,
    }
