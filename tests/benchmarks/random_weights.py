"""Random-weight model folders large enough to be timed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiny import build

Overrides = dict[str, Any]

WINDOW = 512
"""Sliding window of the window layers: far below the longest prompt."""
LONGEST = 40_960
IMAGE_EDGE = 448
"""Pixels along an image's sides; 196 tokens for a Qwen model."""
FIXED_EDGE = 224
"""Sides to which a tower of fixed size scales every image: 256 patches."""
QUIET = 0.05
"""Factor on the output rows of tokens that are not printable ASCII."""


def overrides(family: str, hidden: int, layers: int) -> Overrides:
    """`config.json` values for that width and depth, heads of 32 dimensions."""
    heads = max(2, hidden // 32)
    text: Overrides = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
        "max_position_embeddings": LONGEST,
    }
    own = _OWN.get(family)
    return text | (own(hidden, layers) if own else {})


_VISION: Overrides = {
    "hidden_size": 256,
    "intermediate_size": 768,
}


def _gemma(hidden: int, layers: int) -> Overrides:
    vision = {
        "model_type": "siglip_vision_model",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "patch_size": 14,
        "image_size": FIXED_EDGE,
        "num_channels": 3,
        "layer_norm_eps": 1e-6,
    }
    return {
        "sliding_window": WINDOW,
        "sliding_window_pattern": min(6, layers),
        "query_pre_attn_scalar": 32,
        "vision_config": _VISION | vision,
    }


def _qwen_vision(model_type: str, hidden: int, deepstack: list[int]) -> Overrides:
    vision = {
        "model_type": model_type,
        "depth": 6,
        "num_heads": 8,
        "patch_size": 16,
        "spatial_patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "out_hidden_size": hidden,
        "num_position_embeddings": (IMAGE_EDGE // 16) ** 2,
        "deepstack_visual_indexes": deepstack,
    }
    return {"vision_config": _VISION | vision}


def _qwen3_vl(hidden: int, layers: int) -> Overrides:
    rope = {"mrope_interleaved": True, "mrope_section": [8, 4, 4], "rope_type": "default"}
    return {"rope_scaling": rope} | _qwen_vision("qwen3_vl", hidden, [1, 3])


def _qwen3_5(hidden: int, layers: int) -> Overrides:
    heads = max(2, hidden // 32)
    return {
        "full_attention_interval": min(3, layers),
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "mtp_num_hidden_layers": 0,
    } | _qwen_vision("qwen3_5", hidden, [])


_OWN: Mapping[str, Callable[[int, int], Overrides]] = {
    "gemma3": _gemma,
    "qwen3_vl": _qwen3_vl,
    "qwen3_5": _qwen3_5,
}


def write_model(folder: Path, family: str, dtype: str, hidden: int, layers: int) -> Path:
    """Any server can load it; it answers in printable ASCII and never ends."""
    path = build(folder, family, dtype=dtype, **overrides(family, hidden, layers))
    _widen_vision(path)
    _speak_ascii(path)
    return path


def _widen_vision(folder: Path) -> None:
    path = folder / "preprocessor_config.json"
    if not path.exists():
        return
    config = json.loads(path.read_text())
    if "longest_edge" in config["size"]:
        config["size"]["longest_edge"] = IMAGE_EDGE * IMAGE_EDGE
    else:
        config["size"] = {"height": FIXED_EDGE, "width": FIXED_EDGE}
    path.write_text(json.dumps(config))


def _speak_ascii(folder: Path) -> None:
    """Weaken the output rows of other tokens: broken characters would hide equal answers."""
    import mlx.core as mx
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    path = folder / "model.safetensors"
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    head = next(
        n for end in ("lm_head.weight", "embed_tokens.weight") for n in weights if n.endswith(end)
    )
    texts = [tokenizer.decode([i]) for i in range(weights[head].shape[0])]
    other = [i for i, t in enumerate(texts) if not (t and t.isascii() and t.isprintable())]
    rows = mx.ones((weights[head].shape[0], 1), dtype=weights[head].dtype)
    rows[mx.array(other)] = QUIET
    weights[head] = weights[head] * rows
    mx.eval(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
