"""`config.json` of each tiny family: real architectures, very small."""

from collections.abc import Mapping
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
    config: Config
    """`config.json` without the token ids of its dialect, and with special tokens for ids."""
    library: str = "mlx_lm"
    """Whose model class names the weights: `mlx_lm` or `mlx_vlm`."""
    processor: Mapping[str, Config] | None = None

    @property
    def vision(self) -> bool:
        return self.processor is not None

    def config_with(self, ids: Mapping[str, int]) -> Config:
        """`config.json` with the ids of special tokens."""
        return {
            name: ids.get(value, value) if isinstance(value, str) else value
            for name, value in self.config.items()
        }


_GEMMA3_TEXT: Config = _PLAIN | {
    "model_type": "gemma3_text",
    "sliding_window": 24,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "rope_theta": 1_000_000.0,  # mlx-vlm takes no other
    "rope_local_base_freq": 10000.0,
}
_GEMMA4_TEXT: Config = _PLAIN | {
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
_GPT_OSS: Config = _PLAIN | {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_NEMOTRON_H: Config = _PLAIN | {
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
_JAMBA: Config = _PLAIN | {
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
_RWKV7: Config = _PLAIN | {
    "model_type": "rwkv7",
    "norm_eps": 1e-5,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 8,
    "gate_low_rank_dim": 8,
    "decay_low_rank_dim": 8,
}
_DEEPSEEK_V3: Config = _PLAIN | {
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
_LLAMA4: Config = {
    "model_type": "llama4",
    "text_config": _PLAIN
    | {
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
    },
}
_AFM7: Config = {
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
_SPARSE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_SHARED = _SPARSE | {"shared_expert_intermediate_size": 32, "mtp_num_hidden_layers": 0}
_QWEN3_NEXT: Config = {
    **{name: value for name, value in _HYBRID.items() if name != "rope_parameters"},
    **_SHARED,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "model_type": "qwen3_next",
}

_TOWER: Config = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
}
_MEDIA: Config = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}


def _qwen3_media(model_type: str, deepstack: list[int], text: Config) -> Config:
    vision = _TOWER | {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 64,
        "patch_size": 16,
        "spatial_patch_size": 16,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": deepstack,
    }
    return _MEDIA | {"model_type": model_type, "vision_config": vision, "text_config": text}


def _qwen2_media(model_type: str, vision: Config) -> Config:
    return {
        **_PLAIN,
        **_MEDIA,
        "model_type": model_type,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]},
        "vision_config": _TOWER | {"model_type": model_type} | vision,
    }


_ROPE = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
_SEEING = _PLAIN | {"rope_scaling": _ROPE}
_QWEN3_VL = _qwen3_media("qwen3_vl", [0, 1], _SEEING | {"model_type": "qwen3_vl_text"})
_QWEN3_VL_MOE = _qwen3_media(
    "qwen3_vl_moe", [0, 1], _SEEING | _SPARSE | {"model_type": "qwen3_vl_moe_text"}
)
_QWEN3_5 = _qwen3_media("qwen3_5", [], _HYBRID)
_QWEN3_5_MOE = _qwen3_media(
    "qwen3_5_moe", [], _HYBRID | _SHARED | {"model_type": "qwen3_5_moe_text"}
)
_QWEN2_VL = _qwen2_media("qwen2_vl", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2})
_QWEN2_5_VL = _qwen2_media(
    "qwen2_5_vl",
    {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
)
_GEMMA3: Config = {
    "model_type": "gemma3",
    "text_config": _GEMMA3_TEXT | {"mm_tokens_per_image": 16},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "patch_size": 14,
        "image_size": 112,
        "num_channels": 3,
        "layer_norm_eps": 1e-6,
    },
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
    "mm_tokens_per_image": 16,
}

_SIZE = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
_QWEN_PROCESSOR: dict[str, Config] = {
    "preprocessor_config.json": _PATCHES
    | {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": _SIZE,
    },
    "video_preprocessor_config.json": _PATCHES
    | {"video_processor_type": "Qwen3VLVideoProcessor", "size": _SIZE},
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
    TinyFamily("llama", LLAMA, (_KV,) * 2, _PLAIN | {"model_type": "llama"}),
    TinyFamily("qwen3", QWEN, (_KV,) * 2, _PLAIN | {"model_type": "qwen3"}),
    TinyFamily("gemma3_text", GEMMA, (_WINDOW, _KV), _GEMMA3_TEXT),
    TinyFamily("gemma4_text", GEMMA, (_WINDOW, _KV) * 2, _GEMMA4_TEXT),
    TinyFamily("gpt_oss", QWEN, (_WINDOW, _KV) * 2, _GPT_OSS),
    TinyFamily(
        "qwen3_5_text",
        QWEN,
        (_STATE, _KV),
        _HYBRID | {"model_type": "qwen3_5", "mtp_num_hidden_layers": 0},
    ),
    TinyFamily("qwen3_next", QWEN, (_STATE, _KV), _QWEN3_NEXT),
    TinyFamily("nemotron_h", QWEN, (_STATE, _KV, _STATE), _NEMOTRON_H),
    TinyFamily("jamba", QWEN, (_STATE, _KV), _JAMBA),
    TinyFamily("rwkv7", QWEN, (_STATE,) * 2, _RWKV7),
    TinyFamily("llama4", LLAMA, (_CHUNKED, _CHUNKED, _CHUNKED, _KV), _LLAMA4),
    TinyFamily("deepseek_v3", QWEN, (_KV,) * 2, _DEEPSEEK_V3),
    TinyFamily("afm7", QWEN, (_KV,) * 3, _AFM7),
    TinyFamily("qwen3_vl", QWEN, (_KV,) * 2, _QWEN3_VL, "mlx_vlm", _QWEN_PROCESSOR),
    TinyFamily("qwen3_vl_moe", QWEN, (_KV,) * 2, _QWEN3_VL_MOE, "mlx_vlm", _QWEN_PROCESSOR),
    TinyFamily("qwen2_vl", QWEN, (_KV,) * 2, _QWEN2_VL, "mlx_vlm", _QWEN2_PROCESSOR),
    TinyFamily("qwen2_5_vl", QWEN, (_KV,) * 2, _QWEN2_5_VL, "mlx_vlm", _QWEN2_5_PROCESSOR),
    TinyFamily("gemma3", GEMMA, (_WINDOW, _KV), _GEMMA3, "mlx_vlm", _GEMMA_PROCESSOR),
    TinyFamily("qwen3_5", QWEN, (_STATE, _KV), _QWEN3_5, "mlx_vlm", _QWEN_PROCESSOR),
    TinyFamily("qwen3_5_moe", QWEN, (_STATE, _KV), _QWEN3_5_MOE, "mlx_vlm", _QWEN_PROCESSOR),
)
"""Sliding windows hold 24 tokens, llama4's chunks 16."""
