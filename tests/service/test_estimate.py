"""What a config says of memory, against what the engine accounts for the loaded model."""

from pathlib import Path
from typing import Any

import pytest

from mlx_provider.engine.row_cache import profile
from mlx_provider.engine.scheduling.ledger import MemoryProfile
from mlx_provider.errors import BadRequest
from mlx_provider.families.checkpoint import read_json
from mlx_provider.records import LoadOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving import solo_rows
from mlx_provider.serving.estimate import Footprint, context_that_fits, footprint
from mlx_provider.serving.weight_files import weights_estimate
from tiny import FAMILIES, build

TOKENS = 40
"""More than any tiny window holds."""
GB = 10**9


@pytest.fixture(scope="module")
def registry() -> PluginRegistry:
    return PluginRegistry.discover()


def config_of(folder: Path) -> dict[str, Any]:
    return dict(read_json(folder / "config.json"))


def accounted(
    registry: PluginRegistry, folder: Path, *, dtype: str | None = None
) -> tuple[MemoryProfile, int]:
    """The engine's profile of a row, and the bytes of the weights."""
    family, _ = registry.family_for(config_of(folder))
    model = family.load(folder, LoadOptions(dtype=dtype))
    tokens = solo_rows.some_tokens(model, TOKENS, 0)
    found = profile(solo_rows.prefill(model, model.make_cache(), tokens))
    return found, model.info.weights_bytes


def as_footprint(found: MemoryProfile, weights: int) -> Footprint:
    windows = sum(window * each for window, each in found.windows)
    return Footprint(weights, found.token_bytes, found.state_bytes + windows)


SPARSE = ("gpt_oss", "qwen3_next", "jamba", "llama4", "deepseek_v3", "qwen3_vl_moe", "qwen3_5_moe")
"""Their experts run in float32 alone on a CPU (mlx 0.32, `GatherMM`)."""
NAMES = [family.name for family in FAMILIES]


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "float32" if name in SPARSE else "bfloat16") for name in NAMES]
)
def test_the_footprint_from_a_config_equals_that_of_the_loaded_model(
    name: str, dtype: str, registry: PluginRegistry, tmp_path: Path
) -> None:
    folder = build(tmp_path / "m", name, dtype=dtype)
    found, weights = accounted(registry, folder)
    assert footprint(config_of(folder), weights) == as_footprint(found, weights)


def test_the_dtype_of_loading_counts(registry: PluginRegistry, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "qwen3", dtype="bfloat16")
    _, weights = accounted(registry, folder, dtype="float32")
    assert weights == weights_estimate(folder, expanded=4)


LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "per_token", "per_row"),
    [
        # 2 x 8 heads x 128 values x 2 bytes x 32 layers
        (LLAMA_8B, 131_072, 0),
        # its file names a window, and leaves to the class which layers have it: five of six
        (
            {
                "model_type": "gemma3",
                "torch_dtype": "bfloat16",
                "vocab_size": 262_208,
                "text_config": {
                    "model_type": "gemma3_text",
                    "hidden_size": 5376,
                    "intermediate_size": 21_504,
                    "num_hidden_layers": 62,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 16,
                    "head_dim": 128,
                    "sliding_window": 1024,
                },
            },
            10 * 8192,
            52 * 1024 * 8192,
        ),
        # windows that a file names and no layer has
        (LLAMA_8B | {"sliding_window": 4096, "use_sliding_window": False}, 131_072, 0),
    ],
)
def test_published_configs_give_the_expected_footprint(
    config: dict[str, Any], per_token: int, per_row: int
) -> None:
    assert footprint(config, 7) == Footprint(7, per_token, per_row)


@pytest.mark.parametrize("config", [{}, {"model_type": "nobody"}, {"num_hidden_layers": 3}])
def test_a_config_of_no_model_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="does not describe"):
        footprint(config, 1)


def test_the_context_that_fits_is_the_largest_within_memory_and_limit() -> None:
    told = Footprint(weights=5 * GB, kv_per_token=100_000, per_row=GB)
    assert context_that_fits(told, 8 * GB, None) == 19_968
    assert context_that_fits(told, 8 * GB, 4000) == 4000
    assert context_that_fits(told, 4 * GB, None) == 0
    assert context_that_fits(told, 6 * GB + 1, 4000) == 0
    assert context_that_fits(Footprint(GB, 0, GB), 2 * GB, 4000) == 4000
    tokens = context_that_fits(told, 8 * GB, None)
    free = 8 * GB - told.weights - told.per_row
    assert told.kv_per_token * tokens <= free < told.kv_per_token * (tokens + 256)
