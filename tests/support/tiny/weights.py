"""Seeded random weights under which a tiny model's next token depends on its context."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mlx.core as mx

    Parameters = dict[str, mx.array]

Array = NDArray[np.float64]

SHARPNESS = 2.0
"""Scale of queries and keys: flat attention would draw every context to the same tokens."""
CALM = 0.8
"""Scale where attention does not divide by the root of the width of a head."""
FAINT = 0.15
"""Scale of what the layers of a foreseeable model add."""


def model_parameters(
    library: str, config: Mapping[str, Any], seed: int, *, foreseeable: bool = False
) -> Parameters:
    """Named as the library's model names them. `foreseeable`: see `build`."""
    import mlx.core as mx

    shapes = _shapes(library, config)
    dice = np.random.default_rng(seed)
    tied = config["model_type"] == "gemma3"
    gemma = config["model_type"].startswith("gemma")
    zero_centred = config["model_type"].startswith("gemma3")
    found: Parameters = {}
    for name, shape in sorted(shapes.items()):
        if tied and name.endswith("lm_head.weight"):
            continue
        own_norm = zero_centred and not name.startswith("vision_tower")
        value = _gemma_norm(name, shape, dice) if own_norm and _is_norm(name, shape) else None
        if value is None:
            value = _draw(name, shape, dice)
        if config["model_type"] == "gemma4_text" and ("q_norm" in name or "k_norm" in name):
            value *= CALM / SHARPNESS  # its attention scales no products
        if gemma and not tied and "embed_tokens.weight" in name:
            value /= math.sqrt(shape[-1])  # Gemma multiplies embeddings by this
        if (tied and "embed_tokens" in name) or name == "model.embedding.weight":
            # With a strong input direction, a model with a tied head would only repeat its input.
            value *= 0.2 / math.sqrt(shape[-1])
        if name == "model.output_norm.weight":  # afm7: its tied head leaves flat logits
            value *= 5.0
        if foreseeable:
            value = _foreseeable(name, value)
            if config["model_type"] == "gemma4_text" and "post_" in name:
                value *= FAINT  # its layers normalise their output
        found[name] = mx.array(value.astype(np.float32))
    return found


def _shapes(library: str, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    from mlx.utils import tree_flatten

    model = _model(library, json.loads(json.dumps(config)))
    found = {name: tuple(value.shape) for name, value in tree_flatten(model.parameters())}
    if config.get("text_config", config).get("mtp_num_hidden_layers"):
        found |= _mtp_head(found)
    return found


def _model(library: str, config: dict[str, Any]) -> Any:
    module = importlib.import_module(f"{library}.models.{config['model_type']}")
    if library == "mlx_lm":
        return module.Model(module.ModelArgs.from_dict(config))
    from mlx_vlm.utils import update_module_configs

    arguments = module.ModelConfig.from_dict(config)
    return module.Model(update_module_configs(arguments, module, config, ["text", "vision"]))


def _mtp_head(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A layer like the last one with attention, and the projection that joins its two inputs."""
    last = [name for name in shapes if name.endswith("self_attn.q_proj.weight")][-1]
    layer = last.removesuffix("self_attn.q_proj.weight")
    copied = {
        "mtp.layers.0." + name.removeprefix(layer): shape
        for name, shape in shapes.items()
        if name.startswith(layer)
    }
    hidden = shapes[f"{layer}input_layernorm.weight"][0]
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    joined = {f"mtp.{norm}.weight": (hidden,) for norm in norms}
    return copied | joined | {"mtp.fc.weight": (hidden, 2 * hidden)}


def _foreseeable(name: str, value: Array) -> Array:
    """Layers add little to the embedding's prediction of the next token, and the head of drafts
    passes that embedding on."""
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        return FAINT * value
    if name == "mtp.fc.weight":
        hidden = len(value)
        return np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1)
    return value


def _is_norm(name: str, shape: tuple[int, ...]) -> bool:
    return "norm" in name and name.endswith("weight") and len(shape) <= 2 and "proj" not in name


def _gemma_norm(name: str, shape: tuple[int, ...], dice: np.random.Generator) -> Array:
    """Gemma's RMSNorm multiplies by 1 + weight. Offsets sharpen attention and calm residuals."""
    offset = 0.0
    if "q_norm" in name or "k_norm" in name:
        offset = 1.0
    elif "post_" in name:
        offset = -0.4
    elif name.endswith("model.norm.weight"):
        offset = 4.0
    return offset + 0.1 * dice.standard_normal(shape)


def _draw(name: str, shape: tuple[int, ...], dice: np.random.Generator) -> Array:
    noise: Array = np.asarray(dice.standard_normal(shape))
    last = name.rsplit(".", 1)[-1]
    if last == "A_log":  # slow decay: old tokens matter
        return np.log(dice.uniform(0.02, 0.5, shape))
    if last == "dt_bias":
        return dice.uniform(-1.0, 1.0, shape)
    if last.startswith("quant_"):  # afm7: the step to which keys and values are rounded
        return np.full(shape, 0.02)
    if last == "layer_scalar":  # gemma4: times the output of a layer
        return 1.0 + 0.1 * noise
    if last == "D" or _is_norm(name, shape):
        return (SHARPNESS if "q_norm" in name or "k_norm" in name else 1.0) + 0.1 * noise
    if "conv1d.weight" in name or "pos_embed" in name or "position_embedding" in name:
        return 0.5 * noise
    if "embed_tokens" in name or "embeddings" in name or "embedding.weight" in name:
        return noise
    if name.endswith("w_lora.lora.2.bias"):  # rwkv7: decay near one
        return noise - 4.0
    if len(shape) < 2 or last.startswith(("x_", "k_", "r_")) or last == "bias":
        return 0.05 * noise + (0.5 if last.startswith(("x_", "k_", "r_")) else 0.0)
    if "mm_input_projection" in name:
        return noise / math.sqrt(shape[0])
    inner = shape[1:] if "patch_embed" in name else shape[-1:]
    sharp = name.endswith(("q_proj.weight", "k_proj.weight", "mixer.out_proj.weight"))
    return (SHARPNESS if sharp else 1.0) * noise / math.sqrt(math.prod(inner))
