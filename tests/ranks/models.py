"""Tiny models whose parts divide by four, in several formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_provider.testing.tiny import build
from mlx_provider.testing.tiny.quantised import quantise

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
STATES = HEADS | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
QWEN_EXPERTS = EXPERTS | {"num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
SHARED = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
GLM = EXPERTS | {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
}
TEXT, QWEN_VL = "mlx_provider_text", "mlx_provider_qwen3_vl"
QWEN_HYBRID, GEMMA = "mlx_provider_qwen3_5", "mlx_provider_gemma3"

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (TEXT, "llama", HEADS),
    "qwen3": (TEXT, "qwen3", HEADS),
    "qwen3_moe": (TEXT, "qwen3", HEADS | QWEN_EXPERTS | {"model_type": "qwen3_moe"}),
    "gpt_oss": (TEXT, "gpt_oss", HEADS | {"intermediate_size": 128}),
    "glm4_moe": (TEXT, "qwen3", HEADS | GLM | {"model_type": "glm4_moe"}),
    "gemma3_text": (TEXT, "gemma3_text", HEADS),
    "qwen3_next": (TEXT, "qwen3_next", STATES | SHARED),
    "qwen3_5_text": (TEXT, "qwen3_5_text", STATES),
    "deepseek_v3": (
        TEXT,
        "deepseek_v3",
        {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 128},
    ),
    "qwen3_vl": (QWEN_VL, "qwen3_vl", HEADS),
    "qwen3_vl_moe": (QWEN_VL, "qwen3_vl_moe", HEADS | {"moe_intermediate_size": 128}),
    "qwen3_5": (QWEN_HYBRID, "qwen3_5", STATES),
    "qwen3_5_moe": (QWEN_HYBRID, "qwen3_5_moe", STATES | SHARED),
    "gemma3": (GEMMA, "gemma3", HEADS),
    "qwen3_vl, two KV heads": (QWEN_VL, "qwen3_vl", HEADS | {"num_key_value_heads": 2}),
    "qwen3_5_text, two KV heads": (TEXT, "qwen3_5_text", STATES | {"num_key_value_heads": 2}),
}
"""Plugin, tiny family and overrides of each."""
ODD = {"num_attention_heads": 5, "num_key_value_heads": 1}
ODD_STATES = ODD | {"linear_num_key_heads": 5, "linear_num_value_heads": 5}
WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 8192,
    },
}
RING = EXPERTS | {
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 7,
    "num_experts": 4,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LAYERED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": (TEXT, "qwen3", ODD | {"model_type": "qwen2"}),
    "qwen3_moe": (TEXT, "qwen3", ODD | QWEN_EXPERTS | {"model_type": "qwen3_moe"}),
    "glm4_moe": (TEXT, "qwen3", ODD | GLM | {"model_type": "glm4_moe"}),
    "ministral3": (TEXT, "qwen3", ODD | WINDOWED | {"model_type": "ministral3"}),
    "deepseek_v3": (
        TEXT,
        "deepseek_v3",
        {"num_attention_heads": 5, "num_key_value_heads": 5, "moe_intermediate_size": 128},
    ),
    "bailing_hybrid": (TEXT, "qwen3", RING),
    "qwen3_next": (TEXT, "qwen3_next", ODD_STATES | SHARED),
    "qwen3_5_text": (TEXT, "qwen3_5_text", ODD_STATES),
}
"""The same of models that split layer by layer alone: their heads do not divide by two or three,
or are of no known kind. Two and three ranks have unlike numbers of layers, and of some unlike
kinds."""
FORMATS = ("float32", "bfloat16", "4 bit", "4 bit, bfloat16")
"""`4 bit` computes in float32, so that nothing else is rounded."""


def write(
    folder: Path, name: str, form: str = "float32", *, layered: bool = False, **sizes: Any
) -> Path:
    """A model in a folder. `layered`: one of `LAYERED`; `sizes`: further entries of its
    `config.json`."""
    _, family, overrides = (LAYERED if layered else MODELS)[name]
    rounds = "bfloat16" if "bfloat16" in form else "float32"
    build(folder, family, dtype=rounds, **(overrides | sizes))
    if form.startswith("4 bit"):
        quantise(folder, family, dtype=rounds)
    return folder


def job(
    folder: Path,
    name: str,
    form: str = "float32",
    *,
    count: int = 30,
    layered: bool = False,
    **sizes: Any,
) -> dict[str, Any]:
    """A written model, and what to do with it: an argument of `answers.answer`.

    `count`: tokens to be decoded; `layered`: one of `LAYERED`; `sizes`: further entries of
    its `config.json`.
    """
    write(folder, name, form, layered=layered, **sizes)
    plugin = (LAYERED if layered else MODELS)[name][0]
    return {"plugin": plugin, "folder": str(folder), "count": count, "layered": layered}
