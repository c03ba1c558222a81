"""Qwen3.5, dense and mixture of experts: attention and gated delta nets, with vision."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, UpstreamPatch, hookimpl

mlx_provider_api = 1
MODEL_TYPES = ("qwen3_5", "qwen3_5_moe")
PATCHES = (
    UpstreamPatch(
        "mlx_vlm.models.qwen3_5.gated_delta.gated_delta_chunked",
        "mlx-vlm 0.7.10",
        "pads every call to chunks of 64; without Metal in chunks of 16: 0.13 to 0.53 of the time",
    ),
    UpstreamPatch(
        "mlx_vlm.models.qwen3_5.language._qwen3_5_left_padded_attention",
        "mlx-vlm 0.7.10",
        "attends length after length; in one call: 0.4 of the time for 8 rows of unlike lengths",
    ),
)


def matches(config: Mapping[str, Any]) -> int:
    """Priority 10 for a checkpoint with a vision tower, else 0."""
    return 10 if config.get("model_type") in MODEL_TYPES and config.get("vision_config") else 0


def load(folder: Path, options: LoadOptions) -> LoadedModel:
    """Patch upstream, and load like Qwen3-VL. An MTP head in the folder is ignored."""
    import mlx_provider_qwen3_vl

    from .patches import attend_padded_rows_at_once, take_smaller_chunks

    take_smaller_chunks()
    attend_padded_rows_at_once()
    return mlx_provider_qwen3_vl.load(folder, options)


@hookimpl
def mlx_model_families() -> Iterable[ModelFamily]:
    serves = "Qwen3.5: text, images, video frames"
    yield ModelFamily("qwen3_5", matches, load, serves, patches=PATCHES)
