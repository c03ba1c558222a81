"""What is known of a model before it is loaded, or downloaded; and which models are offered."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_provider.errors import BadRequest, ModelNotFound, UnsupportedModel
from mlx_provider.families.checkpoint import fingerprint
from mlx_provider.gateway.models import (
    LEAST_CONTEXT_TOKENS,
    MOST_CONTEXT_TOKENS,
    alias,
    candidate,
    candidates_here,
    choose,
    footprint_of,
    recommend,
    require_fit,
)
from mlx_provider.records import LoadOptions
from mlx_provider.serving.estimate import Footprint
from mlx_provider.serving.hub import Outline, checkpoint
from named_plugins import discover

REGISTRY = discover("text", "qwen3_5", "reasoning_parsers")
GB = 10**9
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128_256,
    "max_position_embeddings": 262_144,
    "torch_dtype": "bfloat16",
}
KV = 2 * 32 * 8 * 128 * 2
"""Bytes per token of that model."""
WEIGHTS = 4 * GB
COMMIT = "0" * 40
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer_config.json": json.dumps({"chat_template": "{{ '<think>' }}"}).encode(),
}


@pytest.fixture(autouse=True)
def model(hub: Any) -> None:
    """The Hub has `maker/model`, without the bytes of its weights."""
    hub.files["maker/model"] = FILES | {"model.safetensors": b""}
    hub.sizes["model.safetensors"] = WEIGHTS


def cached(root: Path, name: str, config: dict[str, object], weights: int) -> None:
    folder = root / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    with (snapshot / "model.safetensors").open("wb") as file:
        file.truncate(weights)  # sparse
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)


def test_config_and_size_are_read_from_the_hub_without_a_download(hub: Any) -> None:
    found = candidate("mlx/maker/model", REGISTRY, 16 * GB)
    assert not [path for path in hub.asked if path.endswith(".safetensors")]
    assert (found.weights, found.here, found.served.own_context) == (WEIGHTS, False, 262_144)
    room = int(0.9 * 16 * GB) - WEIGHTS
    assert found.served.context == room // KV // 256 * 256
    assert found.served.thinks
    assert (
        found.summary == f"maker/model: 4.0 GB, to be downloaded, context {found.served.context:,}"
    )
    assert candidate("maker/model", REGISTRY, 64 * GB).served.context == MOST_CONTEXT_TOKENS
    with pytest.raises(ModelNotFound):
        candidate("maker/other", REGISTRY, 16 * GB)


def test_the_largest_local_model_that_fits_is_chosen(hub: Any, tmp_path: Path) -> None:
    assert choose(None, REGISTRY_WITH_DEMO, 16 * GB).served.model == "demo"
    cached(tmp_path, "maker/small", CONFIG, GB)
    cached(tmp_path, "maker/large", CONFIG, 4 * GB)
    cached(tmp_path, "maker/huge", CONFIG, 40 * GB)
    cached(tmp_path, "maker/strange", {"model_type": "nobody"}, GB)
    (tmp_path / "hub" / "models--maker--half").mkdir()
    here = candidates_here(REGISTRY, 16 * GB)
    assert [each.served.model for each in here] == ["maker/large", "maker/small"]
    assert choose(None, REGISTRY, 16 * GB, 20_000).served.context == 20_000
    assert hub.asked == []


REGISTRY_WITH_DEMO = discover("qwen3_vl")


def test_a_model_or_context_that_does_not_fit_is_refused_with_figures(hub: Any) -> None:
    found = candidate("maker/model", REGISTRY, 6 * GB)
    assert 0 < found.served.context < LEAST_CONTEXT_TOKENS
    with pytest.raises(BadRequest, match=r"4\.0 GB of weights leave room for a context of \d"):
        require_fit(found, 6 * GB)
    wanted = candidate("maker/model", REGISTRY, 16 * GB, 200_000)
    with pytest.raises(BadRequest, match="not of 200,000"):
        require_fit(wanted, 16 * GB, 200_000)


def test_recommended_models_leave_memory_for_a_context() -> None:
    few, many = recommend(REGISTRY, 8 * GB), recommend(REGISTRY, 80 * GB)
    assert 0 < len(few) < len(many)
    assert few == many[-len(few) :]
    assert recommend(REGISTRY, 1 * GB) == []


@pytest.mark.parametrize("name", ["maker/model", "/folder/model", "maker/model@main", "~/model/"])
def test_the_alias_of_a_model_is_the_last_part_of_its_name(name: str) -> None:
    assert alias(name) == "model"


def test_a_broken_or_unsupported_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadRequest, match="does not hold a JSON object"):
        checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(UnsupportedModel):
        candidate(str(tmp_path), REGISTRY, GB)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "pruned")
    with pytest.raises(BadRequest, match="leads to no file"):
        fingerprint(tmp_path, LoadOptions())


def test_a_config_without_known_layers_has_a_footprint_of_weights_only() -> None:
    strange = Outline({"model_type": "nobody"}, GB, "", here=True)
    assert footprint_of(strange) == Footprint(GB, 0, 0)
    assert footprint_of(Outline(CONFIG, WEIGHTS, "", here=True)).kv_per_token == KV
