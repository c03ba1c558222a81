"""Tiny random-weight model folders, written in well under a second, without torch or network, and
deterministic images and videos to show them.

    from tiny import build
    folder = build(tmp_path / "model", "qwen3", seed=3)

The same family, seed and overrides give the same files. Weights are float32, so that greedy
decoding has no ties; rows of special tokens in the output matrix are (nearly) zero, so that it
never ends by itself. `mlx_lm.load` reads every folder, `mlx_vlm.load` those with vision.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mlx_provider.records import DraftOptions, MediaItem
from mlx_provider.registry import PluginRegistry
from tiny_pictures import encoded, image_part

from .configs import FAMILIES, TinyFamily
from .tokenizers import write_tokenizer
from .weights import model_parameters


def tiny_pixels(seed: int, height: int = 96, width: int = 96) -> NDArray[np.uint8]:
    """(height, width, 3): six by six random patches."""
    patches = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    rows = np.arange(height) * 6 // height
    columns = np.arange(width) * 6 // width
    return np.ascontiguousarray(patches[rows][:, columns])


def tiny_image(seed: int, height: int = 96, width: int = 96) -> MediaItem:
    return _item("image", tiny_pixels(seed, height, width))


def tiny_video(seed: int, frames: int = 4, height: int = 64, width: int = 96) -> MediaItem:
    pixels = [tiny_pixels(seed * 1000 + i, height, width) for i in range(frames)]
    return _item("video", np.stack(pixels))


def tiny_image_part(seed: int = 1) -> dict[str, Any]:
    """The image as a part of a message."""
    return image_part(encoded(Image.fromarray(tiny_pixels(seed))))


def _item(kind: str, pixels: NDArray[np.uint8]) -> MediaItem:
    key = hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()
    return MediaItem.of("video" if kind == "video" else "image", pixels, key)


def family_named(name: str) -> TinyFamily:
    """Raises `ValueError` that lists the known ones."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise ValueError(f"unknown tiny family {name!r}; known: {[f.name for f in FAMILIES]}")


def build(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    emit_special: bool = False,
    foreseeable: bool = False,
    generation: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """`overrides` replace values of `config.json`: in `text_config` if it has the key, else in
    `vision_config`, else at the top. `emit_special`: special tokens keep random output rows, so
    that greedy decoding may end by itself. `foreseeable`: a token mostly depends on the one before,
    and an MTP head (`mtp_num_hidden_layers=1`) often guesses it. `generation`: further entries of
    `generation_config.json`."""
    chosen = family_named(family)
    folder.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(folder, chosen.dialect)
    config = _overridden(chosen.config_with(ids), overrides)
    eos = [ids[token] for token in chosen.dialect.eos]
    config |= {"eos_token_id": eos, "pad_token_id": ids[chosen.dialect.pad], "torch_dtype": dtype}
    if chosen.dialect.bos:
        config["bos_token_id"] = ids[chosen.dialect.bos]
    weights = model_parameters(chosen.library, config, seed, foreseeable=foreseeable)
    if not emit_special:
        _mute(weights, ids)
    _write_weights(folder, weights, dtype)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos} | dict(generation or {}))
    for name, content in (chosen.processor or {}).items():
        _write_json(folder / name, content)
    return folder


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(config))
    for key, value in overrides.items():
        nested = [result[part] for part in ("text_config", "vision_config") if part in result]
        target = next((part for part in nested if key in part), result)
        target[key] = value
    return result


def _mute(weights: dict[str, Any], ids: Mapping[str, int]) -> None:
    import mlx.core as mx

    head = _head_name(weights)
    # A tied head is the input embedding too, so its rows only shrink.
    factor = 0.0 if "lm_head" in head else 0.1
    rows = mx.ones((weights[head].shape[0], 1))
    known = ids[""]
    silent = [*(i for t, i in ids.items() if t), *range(known, weights[head].shape[0])]
    rows[mx.array(silent)] = factor
    weights[head] = weights[head] * rows


def _write_weights(folder: Path, weights: Mapping[str, Any], dtype: str) -> None:
    import mlx.core as mx

    kind = getattr(mx, dtype)
    cast = {k: v if k.endswith("A_log") else v.astype(kind) for k, v in weights.items()}
    mx.eval(list(cast.values()))
    mx.save_safetensors(str(folder / "model.safetensors"), cast, metadata={"format": "mlx"})


def _head_name(weights: Mapping[str, Any]) -> str:
    for end in ("lm_head.weight", "embed_tokens.weight", "embedding.weight"):
        found = [name for name in weights if name.endswith(end) and not name.startswith("mtp.")]
        if found:
            return found[0]
    raise ValueError("no output matrix among the weights")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))


ALONE = {"afm7": "upstream rounds keys to steps, which another batch moves"}
"""Models whose rows do not decode together, and why: the checks of families would refuse them."""
COMPUTES = ("qwen3", "gemma3_text", "qwen3_5")
"""Models that call what our kernels replace."""


def _drafted(folder: Path, *, smaller: bool = False, **more: Any) -> DraftOptions:
    build(folder, **more)
    if not smaller:
        return DraftOptions()
    return DraftOptions(model=build(folder / "smaller", "qwen3", seed=4, num_hidden_layers=2))


def checkpoints_for(record: str) -> Mapping[str, Callable[[Path], object]]:
    """Functions that write tiny checkpoints for the checks of one of our families, drafters or
    kernels, by label."""
    if record in ("lookup", "model", "mtp"):
        head = {"family": "qwen3_5", "mtp_num_hidden_layers": 1, "foreseeable": True}
        return {
            "qwen3": partial(_drafted, family="qwen3"),
            "with a smaller one": partial(_drafted, family="qwen3", smaller=True),
            "with a head": partial(_drafted, **head),
        }
    if record in ("cpu", "cuda"):
        return {name: partial(build, family=name, intermediate_size=512) for name in COMPUTES}
    registry, found = PluginRegistry.discover(), dict[str, Callable[[Path], object]]()
    for tiny in FAMILIES:
        if tiny.name not in ALONE and registry.family_for(tiny.config)[0].name == record:
            found[tiny.name] = partial(build, family=tiny.name)
    return found
