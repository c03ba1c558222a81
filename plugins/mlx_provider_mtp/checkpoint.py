"""Reads the tensors of an MTP head from a checkpoint, with the names of our `Head`."""

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
"""Prefixes of the head's tensors: the makers' and the converters'."""
KNOWN = re.compile(r"fc\.\w+|norm\.weight|pre_fc_norm_(?:embedding|hidden)\.weight|layers\.0\..+")
FORMS = ("weight", "bias", "scales", "biases", "gate_up_proj", "down_proj")
"""Last parts of names. Nothing follows `experts.gate_up_proj`, which is one tensor."""
EXPERT = re.compile(r"(?P<mlp>.+)\.experts\.(?P<index>\d+)\.(?P<rest>.+)")
FUSED = re.compile(r"(?P<mlp>.+)\.experts\.(?P<part>gate_up|down)_proj(?:\.(?P<form>\w+))?")
GAIN = re.compile(r".*norm\.weight|pre_fc_norm_\w+\.weight")
OFFSET_BELOW = 0.9
"""If the mean gain in `layers.0` is lower, all gains are stored minus 1. In Qwen3.5 to 3.8 the mean
is then 0.4 to 0.6, else at least 1.3. Gains outside of `layers.0` do not show this."""


def problem(folder: Path) -> str:
    """Why the folder has no readable head; empty: it has one."""
    names = {name for of_file in _files(folder).values() for name in of_file.values()}
    if not names:
        return "no MTP head in the checkpoint"
    config = read_json(folder / "config.json")
    kinds = {fields.get("model_type") for fields in (config, config.get("text_config") or {})}
    if kinds.isdisjoint(MODEL_TYPES):
        named = ", ".join(sorted(filter(None, kinds))) or "an unknown model"
        return f"its MTP head is not one of Qwen3.5 or Qwen3-Next, but of {named}"
    strange = [n for n in names if not KNOWN.fullmatch(n) or n.rsplit(".", 1)[-1] not in FORMS]
    return f"its MTP head is stored in a form that is not known ({min(strange)})" if strange else ""


def read(folder: Path, dtype: mx.Dtype) -> Tensors:
    """The head's tensors by their names in `Head`: gains as `mlx.nn.RMSNorm` takes them, floats as
    `dtype`. Evaluates only the gains."""
    found: Tensors = {}
    for path, names in _files(folder).items():
        stored: Any = mx.load(str(path))
        for name, short in names.items():
            value = stored[name]
            floats = mx.issubdtype(value.dtype, mx.floating)
            found[short] = value.astype(dtype) if floats else value
    return _join_experts(_restore_gains(found))


def _files(folder: Path) -> dict[Path, dict[str, str]]:
    """For each file with parts of a head: their names without prefix, by full name."""
    found = {path: _names(path) for path in sorted(folder.glob("*.safetensors"))}
    return {path: names for path, names in found.items() if names}


def _names(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {n: HEAD.sub("", n) for n in file.keys() if HEAD.match(n)}  # noqa: SIM118
    except (OSError, SafetensorError):
        return {}  # the load of the model has reported an error, or the file is not of the model


def _restore_gains(tensors: Tensors) -> Tensors:
    """Original checkpoints store gains minus 1, some converters do not."""
    gains = [name for name, value in tensors.items() if value.ndim == 1 and GAIN.fullmatch(name)]
    layer = [mx.mean(tensors[name]) for name in gains if name.startswith("layers.")]
    if not layer or bool((mx.mean(mx.stack(layer)) >= OFFSET_BELOW).item()):
        return tensors
    return tensors | {name: tensors[name] + 1 for name in gains}


def _join_experts(tensors: Mapping[str, mx.array]) -> Tensors:
    """All experts of a layer in one tensor, as mlx-lm has them under `switch_mlp`."""
    found: Tensors = {}
    per_expert: dict[str, dict[int, mx.array]] = defaultdict(dict)
    for name, value in tensors.items():
        if match := EXPERT.fullmatch(name):
            per_expert[f"{match['mlp']}.switch_mlp.{match['rest']}"][int(match["index"])] = value
        elif match := FUSED.fullmatch(name):
            found |= _split(match["mlp"], match["part"], match["form"] or "weight", value)
        else:
            found[name] = value
    for name, by_index in per_expert.items():
        found[name] = mx.stack([by_index[index] for index in sorted(by_index)])
    return found


def _split(mlp: str, part: str, form: str, value: mx.array) -> Tensors:
    """`value`: (experts, width, ...). No head has biases of experts: `load_head` refuses them."""
    if part == "down":
        return {f"{mlp}.switch_mlp.down_proj.{form}": value}
    gate, up = mx.split(value, 2, axis=-2)
    return {f"{mlp}.switch_mlp.gate_proj.{form}": gate, f"{mlp}.switch_mlp.up_proj.{form}": up}
