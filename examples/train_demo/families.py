"""What sets the two kinds of demo model apart: their entries in config.json."""

from dataclasses import dataclass, field

LAYERS = 6
ROPE_THETA = 10000.0
ATTENTION_EVERY = 3  # of the hybrid's layers


@dataclass(frozen=True)
class Family:
    """A model type of transformers with the entries only it has."""

    architecture: str
    text: dict
    vision: dict = field(default_factory=dict)


def _rope(sections: list[int]) -> dict:
    """M-RoPE; the sections (time, height, width) add up to half of the rotated dimensions."""
    return {"mrope_interleaved": True, "mrope_section": sections, "rope_type": "default"}


FAMILIES = {
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        {"rope_theta": ROPE_THETA, "rope_scaling": _rope([6, 5, 5])},
        {"deepstack_visual_indexes": [0]},
    ),
    # Gated delta net with attention at every third layer, and a draft head (see draft_head.py).
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        {
            "rope_parameters": _rope([3, 3, 2])
            | {"rope_theta": ROPE_THETA, "partial_rotary_factor": 0.5},
            "attn_output_gate": True,
            "full_attention_interval": ATTENTION_EVERY,
            "layer_types": [
                "linear_attention" if (layer + 1) % ATTENTION_EVERY else "full_attention"
                for layer in range(LAYERS)
            ],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
        },
        {"deepstack_visual_indexes": []},
    ),
}
