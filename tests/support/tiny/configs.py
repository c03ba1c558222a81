"""`config.json` of each tiny family: real architectures, very small."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .tokenizers import GEMMA, LLAMA, QWEN, Dialect

VOCAB = 384
"""Rows of every embedding matrix; the tokenizers use a few fewer."""

Config = dict[str, Any]

_PLAIN: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_PATCHES = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


@dataclass(frozen=True)
class TinyFamily:
    name: str
    dialect: Dialect
    caches: tuple[str, ...]
    """Class names, first layer first."""
    config: Callable[[Mapping[str, int]], Config]
    """(special-token ids) -> `config.json`, without the token ids of its dialect."""
    library: str = "mlx_lm"
    """Whose model class names the weights: `mlx_lm` or `mlx_vlm`."""
    processor: Mapping[str, Config] | None = None

    @property
    def vision(self) -> bool:
        return self.processor is not None


def _gemma3_text(ids: Mapping[str, int]) -> Config:
    return _PLAIN | {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_theta": 1_000_000.0,  # mlx-vlm takes no other
        "rope_local_base_freq": 10000.0,
    }


def _gemma4_text(ids: Mapping[str, int]) -> Config:
    return _PLAIN | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,  # the last ones read the keys and values of earlier ones
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 24,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _gpt_oss(ids: Mapping[str, int]) -> Config:
    return _PLAIN | {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }


def _nemotron_h(ids: Mapping[str, int]) -> Config:
    return _PLAIN | {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": list("M*-M"),
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    }


def _jamba(ids: Mapping[str, int]) -> Config:
    return _PLAIN | {
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    }


def _rwkv7(ids: Mapping[str, int]) -> Config:
    return _PLAIN | {
        "model_type": "rwkv7",
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    }


def _deepseek_v3(ids: Mapping[str, int]) -> Config:
    return _PLAIN | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }


def _llama4(ids: Mapping[str, int]) -> Config:
    text = _PLAIN | {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 64,
        "intermediate_size_mlp": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
    }
    return {"model_type": "llama4", "text_config": text}


def _afm7(ids: Mapping[str, int]) -> Config:
    return {
        "model_type": "afm7",
        "vocab_size": VOCAB,
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_position_embeddings": 32768,
    }


_HYBRID = _PLAIN | {
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "attn_output_gate": True,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}


def _qwen3_5_text(ids: Mapping[str, int]) -> Config:
    return _HYBRID | {"model_type": "qwen3_5", "mtp_num_hidden_layers": 0}


def _qwen3_next(ids: Mapping[str, int]) -> Config:
    flat = {k: v for k, v in _HYBRID.items() if k != "rope_parameters"}
    sparse = _SPARSE | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 0}
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return flat | sparse | rope | {"model_type": "qwen3_next"}


def _qwen_media(ids: Mapping[str, int], model_type: str, deepstack: list[int]) -> Config:
    vision = {
        "model_type": model_type,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": deepstack,
    }
    return {
        "model_type": model_type,
        "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }


_QWEN_ROPE = {
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "rope_type": "default",
    }
}
_SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _qwen3_vl(ids: Mapping[str, int]) -> Config:
    text = _PLAIN | _QWEN_ROPE | {"model_type": "qwen3_vl_text"}
    return _qwen_media(ids, "qwen3_vl", [0, 1]) | {"text_config": text}


def _qwen3_vl_moe(ids: Mapping[str, int]) -> Config:
    text = _PLAIN | _QWEN_ROPE | _SPARSE | {"model_type": "qwen3_vl_moe_text"}
    return _qwen_media(ids, "qwen3_vl_moe", [0, 1]) | {"text_config": text}


def _qwen2_vl(ids: Mapping[str, int]) -> Config:
    vision = {
        "model_type": "qwen2_vl",
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
    }
    rope = {"type": "mrope", "mrope_section": [4, 2, 2]}
    flat = _PLAIN | _qwen_media(ids, "qwen2_vl", []) | {"rope_scaling": rope}
    return flat | {"vision_config": vision}


def _qwen2_5_vl(ids: Mapping[str, int]) -> Config:
    vision = {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    return _qwen2_vl(ids) | {"model_type": "qwen2_5_vl", "vision_config": vision}


def _qwen3_5(ids: Mapping[str, int]) -> Config:
    return _qwen_media(ids, "qwen3_5", []) | {"text_config": _HYBRID}


def _qwen3_5_moe(ids: Mapping[str, int]) -> Config:
    sparse = _SPARSE | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 0}
    text = _HYBRID | sparse | {"model_type": "qwen3_5_moe_text"}
    return _qwen_media(ids, "qwen3_5_moe", []) | {"text_config": text}


def _gemma3(ids: Mapping[str, int]) -> Config:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "patch_size": 14,
        "image_size": 112,
        "num_channels": 3,
        "layer_norm_eps": 1e-6,
    }
    return {
        "model_type": "gemma3",
        "text_config": _gemma3_text(ids) | {"mm_tokens_per_image": 16},
        "vision_config": vision,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "image_token_index": ids["<image_soft_token>"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "mm_tokens_per_image": 16,
    }


_QWEN_PROCESSOR: dict[str, Config] = {
    "preprocessor_config.json": _PATCHES
    | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    },
    "video_preprocessor_config.json": _PATCHES
    | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    },
}
_QWEN2_PROCESSOR: dict[str, Config] = {
    "preprocessor_config.json": _PATCHES
    | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": 14,
        "min_pixels": 28 * 28,
        "max_pixels": 224 * 224,
    }
}
_QWEN2_5_PROCESSOR: dict[str, Config] = {
    "preprocessor_config.json": _QWEN2_PROCESSOR["preprocessor_config.json"]
    | {"processor_class": "Qwen2_5_VLProcessor"}
}
_GEMMA_PROCESSOR: dict[str, Config] = {
    "preprocessor_config.json": {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_seq_length": 16,
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": 112, "width": 112},
    },
    "processor_config.json": {"image_seq_length": 16, "processor_class": "Gemma3Processor"},
}

_KV, _WINDOW, _STATE = "KVCache", "RotatingKVCache", "ArraysCache"
_CHUNKED = "ChunkedKVCache"

FAMILIES: tuple[TinyFamily, ...] = (
    TinyFamily("llama", LLAMA, (_KV,) * 2, lambda ids: _PLAIN | {"model_type": "llama"}),
    TinyFamily("qwen3", QWEN, (_KV,) * 2, lambda ids: _PLAIN | {"model_type": "qwen3"}),
    TinyFamily("gemma3_text", GEMMA, (_WINDOW, _KV), _gemma3_text),
    TinyFamily("gemma4_text", GEMMA, (_WINDOW, _KV) * 2, _gemma4_text),
    TinyFamily("gpt_oss", QWEN, (_WINDOW, _KV) * 2, _gpt_oss),
    TinyFamily("qwen3_5_text", QWEN, (_STATE, _KV), _qwen3_5_text),
    TinyFamily("qwen3_next", QWEN, (_STATE, _KV), _qwen3_next),
    TinyFamily("nemotron_h", QWEN, (_STATE, _KV, _STATE), _nemotron_h),
    TinyFamily("jamba", QWEN, (_STATE, _KV), _jamba),
    TinyFamily("rwkv7", QWEN, (_STATE,) * 2, _rwkv7),
    TinyFamily("llama4", LLAMA, (_CHUNKED, _CHUNKED, _CHUNKED, _KV), _llama4),
    TinyFamily("deepseek_v3", QWEN, (_KV,) * 2, _deepseek_v3),
    TinyFamily("afm7", QWEN, (_KV,) * 3, _afm7),
    TinyFamily("qwen3_vl", QWEN, (_KV,) * 2, _qwen3_vl, "mlx_vlm", _QWEN_PROCESSOR),
    TinyFamily("qwen3_vl_moe", QWEN, (_KV,) * 2, _qwen3_vl_moe, "mlx_vlm", _QWEN_PROCESSOR),
    TinyFamily("qwen2_vl", QWEN, (_KV,) * 2, _qwen2_vl, "mlx_vlm", _QWEN2_PROCESSOR),
    TinyFamily("qwen2_5_vl", QWEN, (_KV,) * 2, _qwen2_5_vl, "mlx_vlm", _QWEN2_5_PROCESSOR),
    TinyFamily("gemma3", GEMMA, (_WINDOW, _KV), _gemma3, "mlx_vlm", _GEMMA_PROCESSOR),
    TinyFamily("qwen3_5", QWEN, (_STATE, _KV), _qwen3_5, "mlx_vlm", _QWEN_PROCESSOR),
    TinyFamily("qwen3_5_moe", QWEN, (_STATE, _KV), _qwen3_5_moe, "mlx_vlm", _QWEN_PROCESSOR),
)
"""Sliding windows hold 24 tokens, llama4's chunks 16."""
