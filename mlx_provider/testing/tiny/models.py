"""Tiny random-weight model folders, written in well under a second, without torch or network.

    from mlx_provider.testing.tiny import build
    folder = build(tmp_path / "model", "qwen3", seed=3)

The same family, seed and overrides give the same files. Weights are float32, so that greedy
decoding has no ties; rows of special tokens in the output matrix are (nearly) zero, so that it
never ends by itself. `mlx_lm.load` reads every folder, `mlx_vlm.load` those with vision.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .configs import FAMILIES, TinyFamily
from .tokenizers import write_tokenizer
from .weights import model_parameters


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
    config = _overridden(chosen.config(ids), overrides)
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
