"""Whether a smaller model can guess for another one."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_provider import BadRequest, LoadOptions
from mlx_provider.errors import MLXProviderError
from mlx_provider.families.checkpoint import known_to_mlx_lm, read_json
from mlx_provider.families.text import load_text

from .draft_model import KV_BYTES, DraftModel, longest
from .prompt_scoring import ScoringModel

AGREED = 0.99
"""Share of all tokens with equal ids in both models: releases of one line differ in a few."""
NONE_GIVEN = "it needs a smaller model of the same vocabulary: name its folder (draft_model)"
KV_SHARE = 4
"""Rows' caches take at most 1/4 of the memory for a draft model and its rows."""


def problem(folder: Path, draft: Path | None, room: int | None = None) -> str:
    """Why the model in `draft` cannot draft for `folder`; empty: it can. `room`: limit of its
    bytes."""
    if draft is None:
        return NONE_GIVEN
    weights = _weights_bytes(draft)
    if room is not None and weights > room:
        return f"the weights in {draft} are {weights} bytes, there is room for {max(0, room)}"
    try:
        if not known_to_mlx_lm(read_json(draft / "config.json")):
            return f"{draft} holds no text model that mlx-lm has a class for"
        return _unlike(vocabulary(folder), vocabulary(draft))
    except MLXProviderError as error:
        return error.message


def load(
    draft: Path | None, vocab: int, room: int | None = None, *, scores: bool = False
) -> ScoringModel:
    """`vocab`: of the larger model. `scores`: it only scores prompts. Raises `BadRequest`."""
    if draft is None:
        raise BadRequest(NONE_GIVEN, param="draft_model")
    model = load_text(draft, LoadOptions(dtype=_dtype(draft, room)))
    if not longest(model.make_cache()):
        if scores:
            return ScoringModel(model, vocab)
        why = "keeps states, or windows too short, of which the last tokens cannot be taken back"
        raise BadRequest(f"{draft} cannot draft: its cache {why}", param="draft_model")
    most = KV_BYTES if room is None else min(KV_BYTES, room // KV_SHARE)
    return DraftModel(model, vocab, kv_bytes=most)


def _dtype(draft: Path, room: int | None) -> str | None:
    """float32 on a CPU, where MLX is many times slower with narrower weights, if it fits into half
    of `room`."""
    quantised = read_json(draft / "config.json").get("quantization")
    bits = quantised.get("bits", 16) if isinstance(quantised, dict) else 16
    fits = room is None or 2 * _weights_bytes(draft) * 32 <= room * bits
    return "float32" if fits and mx.default_device() == mx.cpu else None


def _weights_bytes(draft: Path) -> int:
    return sum(path.stat().st_size for path in draft.glob("*.safetensors"))


def vocabulary(folder: Path) -> dict[str, int]:
    """Token ids from tokenizer.json. Raises `BadRequest`."""
    path = folder / "tokenizer.json"
    content = read_json(path)
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    if not listed:
        raise BadRequest(f"{path} names no tokens", param="draft_model")
    if isinstance(listed, list):  # Unigram: [token, score]
        listed = {token: number for number, (token, *_) in enumerate(listed)}
    added: list[dict[str, Any]] = content.get("added_tokens") or []
    return {**listed, **{each["content"]: each["id"] for each in added}}


def _unlike(some: dict[str, int], others: dict[str, int]) -> str:
    most = max(len(some), len(others))
    agreed = len(some.items() & others.items())
    if agreed >= AGREED * most:
        return ""
    return f"of {most:,} tokens the two models have {agreed:,} in common, {AGREED:.0%} are needed"
