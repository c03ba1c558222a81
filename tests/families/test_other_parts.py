"""Checkpoints of the text family that hold more than its text model, or not all of it."""

import logging
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from greedy import greedy
from mlx_provider import LoadOptions, UnsupportedModel
from mlx_provider_text import load

PARTS = {
    "vision_tower.blocks.0.attn.qkv.weight": "vision_tower",
    "multi_modal_projector.linear_1.weight": "multi_modal_projector",
    "mtp.layers.0.mlp.up_proj.weight": "mtp",
    "model.visual.patch_embed.weight": "model.visual",
    "model.audio_tower.conv.bias": "model.audio_tower",
    "model.layers.0.self_attn.rotary_emb.inv_freq": "model.layers.0.self_attn.rotary_emb",
    "image_newline": "image_newline",
}
INSIDE = [
    "model.layers.0.self_attn.q_proj.extra",
    "model.layers.3.mlp.up_proj.weight",
    "model.layers.0.mlp.gate.weight",
    "lm_head.bias",
    "transformer.h.0.weight",
]
"""Names that a text model of another kind would have."""


def changed(folder: Path, to: Path, more: dict[str, Any], without: str = "") -> Path:
    copy = Path(shutil.copytree(folder, to / "m"))
    path = str(copy / "model.safetensors")
    weights = {k: v for k, v in mx.load(path).items() if k != without}
    mx.eval(list(weights.values()))
    mx.save_safetensors(path, weights | more, metadata={"format": "mlx"})
    return copy


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_weights_outside_the_text_model_are_not_loaded(
    name: str, folders, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = load(folders(name), LoadOptions())
    more = {part: mx.ones((4, 4)) for part in PARTS}
    with caplog.at_level(logging.INFO, "mlx_provider"):
        model = load(changed(folders(name), tmp_path, more), LoadOptions())
    told = set(PARTS.values()) - {"model.layers.0.self_attn.rotary_emb"}  # upstream drops some
    assert all(part in caplog.text for part in told)
    assert model.info.weights_bytes == plain.info.weights_bytes
    messages = [{"role": "user", "content": "Hello"}]
    prompt = plain.prepare(messages, tools=[], media=[], variables={})
    assert greedy(model, prompt, 6) == greedy(plain, prompt, 6)


@pytest.mark.parametrize("inside", INSIDE)
def test_unknown_weights_within_the_text_model_are_refused(
    inside: str, folders, tmp_path: Path
) -> None:
    folder = changed(folders("llama"), tmp_path, {inside: mx.ones((4, 4))})
    with pytest.raises(UnsupportedModel, match=f"1 weights .{inside}.*config.json"):
        load(folder, LoadOptions())


def test_missing_weights_are_refused_although_others_are_present(folders, tmp_path: Path) -> None:
    lost = "model.layers.1.mlp.up_proj.weight"
    more = {part: mx.ones((4, 4)) for part in PARTS}
    folder = changed(folders("llama"), tmp_path, more, without=lost)
    with pytest.raises(UnsupportedModel, match=f"lacks 1 weights .{lost}"):
        load(folder, LoadOptions())


def test_misnamed_weights_are_refused_with_both_names(folders, tmp_path: Path) -> None:
    lost, other = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.w3.weight"
    folder = changed(folders("llama"), tmp_path, {other: mx.ones((4, 4))}, without=lost)
    with pytest.raises(UnsupportedModel, match=f"{lost}.*{other}.*sanitize") as refused:
        load(folder, LoadOptions())
    assert "download" not in str(refused.value)
