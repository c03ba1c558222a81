"""The default family: any text model that mlx-lm knows."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_provider import LoadedModel, LoadOptions, ModelFamily, SamplingDefaults, hookimpl

mlx_provider_api = 1
QWEN3 = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
SAMPLING = {
    "gpt_oss": SamplingDefaults(temperature=1.0, top_p=1.0),
    "kimi_k2": SamplingDefaults(temperature=0.6),
    "lfm2": SamplingDefaults(temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    "minimax_m2": SamplingDefaults(temperature=1.0, top_p=0.95, top_k=40),
    "qwen2": SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05),
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    "seed_oss": SamplingDefaults(temperature=1.1, top_p=0.95),
    "smollm3": SamplingDefaults(temperature=0.6, top_p=0.95),
}
"""By `model_type`, if a model's files name none. From its page, or its original weights' files."""


@hookimpl
def mlx_model_families() -> Iterator[ModelFamily]:
    serves = "any text model of mlx-lm (Llama, Qwen, Gemma, Mistral, gpt-oss, ...)"
    yield ModelFamily("text", matches, load, serves=serves, sampling=SAMPLING)


def matches(config: Mapping[str, Any]) -> int:
    """1, the lowest priority, for a model that mlx-lm knows, else 0."""
    from mlx_provider.families.checkpoint import known_to_mlx_lm

    return 1 if known_to_mlx_lm(config) else 0


def load(path: Path, options: LoadOptions) -> LoadedModel:
    from mlx_provider.families.text import load_text

    return load_text(path, options)
