"""What cannot be split is refused with a reason, before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_provider import BadRequest, LoadOptions, UnsupportedModel
from mlx_provider.families.sharding import BY_LAYERS, shard
from mlx_provider.families.text import load_text
from mlx_provider.families.vision.loading import load_model
from mlx_provider.protocol.options import ModelOptions
from mlx_provider.testing.tiny import build
from mlx_provider.testing.tiny.quantised import quantise
from mlx_provider.upstream import mlx_lm
from mlx_provider_ranks.loading import LoadingRanks


@dataclass(frozen=True)
class Group:
    """The ranks, as far as cutting weights goes: nothing is sent."""

    ranks: int
    own: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own


def reason(folder: Path, ranks: int, **options: Any) -> str:
    chosen = LoadOptions(group=Group(ranks), **options)
    vision = "vision_config" in (folder / "config.json").read_text()
    with pytest.raises(UnsupportedModel) as caught:
        load_model(folder, chosen) if vision else load_text(folder, chosen)
    return caught.value.message


@pytest.mark.parametrize(
    ("family", "ranks", "changes", "said"),
    [
        ("llama", 4, {"num_attention_heads": 8}, "2 KV heads do not divide by 4"),
        ("llama", 3, {}, "heads do not divide by 3"),
        ("llama", 4, {"num_attention_heads": 4, "num_key_value_heads": 6}, "6 KV heads"),
        ("llama", 2, {"intermediate_size": 127}, "127"),
        ("gpt_oss", 3, {}, "heads do not divide by 3"),
        ("deepseek_v3", 4, {"num_attention_heads": 6}, "its 3 layers are fewer than the processes"),
        ("qwen3_5_text", 5, {}, "2 num_k_heads do not divide by 5, and it does not split layer by"),
        ("gemma3", 3, {}, "4 heads do not divide by 3"),
        ("qwen3_5", 4, {}, "2 num_k_heads do not divide by 4"),
        ("qwen3_vl", 2, {"intermediate_size": 127}, "127 rows of `gate_proj`"),
        ("qwen3_vl", 4, {"num_attention_heads": 12, "num_key_value_heads": 6}, "6 KV heads"),
        ("jamba", 2, {}, "`mamba` of layer 0 is of no known kind"),
        ("rwkv7", 2, {}, "`attn` of layer 0 is of no known kind"),
        ("rwkv7", 2, {}, "layer by layer: upstream has no pipeline for it"),
    ],
)
def test_what_does_not_divide_is_named(
    family: str, ranks: int, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    told = reason(build(tmp_path, family, **changes), ranks)
    assert said in told
    assert f"{family.removesuffix('_text')} cannot be split over {ranks} processes" in told
    assert "fewer processes" in told


def test_a_rank_logs_how_a_vision_model_is_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    load_model(build(tmp_path, "qwen3_vl"), LoadOptions(group=Group(2)))
    assert "qwen3_vl is split by heads" in caplog.messages


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_was_half_split_by_heads_is_whole_when_its_layers_are(
    rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads divide, and the rows of the first matrix of experts do not."""
    folder = build(tmp_path, "deepseek_v3", num_attention_heads=6, num_key_value_heads=6)
    whole = mlx_lm.load(folder, lazy=True).model
    part = mlx_lm.load(folder, lazy=True).model
    caplog.set_level("INFO")
    assert shard(part, Group(3, rank), "deepseek_v3") == BY_LAYERS
    last = 2 - rank
    assert f"deepseek_v3 is split by layers: {last} to {last} are here" in caplog.messages
    expected = dict(tree_flatten(whole.parameters()))
    found = dict(tree_flatten(part.parameters()))
    assert {name: array.shape for name, array in found.items()} == {
        name: array.shape for name, array in expected.items() if _held(name, 2 - rank)
    }
    own = part.model.layers[2 - rank].self_attn
    assert own.num_heads == 6
    assert part.model.layers[: 2 - rank] == [None] * (2 - rank)


def _held(name: str, layer: int) -> bool:
    return ".layers." not in name or f".layers.{layer}." in name


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_quantised_columns_divide_in_whole_groups(family: str, tmp_path: Path) -> None:
    folder = build(tmp_path, family, num_attention_heads=8, num_key_value_heads=4)
    quantise(folder, family, group=64)  # 128 columns of `o_proj`: two groups
    assert "cannot be split over 4 processes" in reason(folder, 4)
    load = load_model if family == "qwen3_vl" else load_text
    if family == "qwen3_vl":  # a text model is tried as it is loaded, which takes real ranks
        load(folder, LoadOptions(group=Group(2)))


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_an_adapter_is_refused(family: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "model", family)
    assert "adapter" in reason(folder, 2, adapter=tmp_path)


@pytest.mark.parametrize(
    "options", [{"reproducible": True}, {"sparse_prefill": 0.5}, {"adapter": "a"}]
)
def test_options_of_a_whole_model_are_refused_by_name(options: dict[str, Any]) -> None:
    ((name, _),) = options.items()
    wanted = ModelOptions.model_validate(options)
    with pytest.raises(BadRequest, match="split over 2 ranks: leave it out") as caught:
        LoadingRanks(group=Group(2)).check(wanted)
    assert caught.value.param == f"model_info.mlx.{name}"
    LoadingRanks(group=Group(1)).check(wanted)


def test_one_rank_is_the_whole_model(tmp_path: Path) -> None:
    folder = build(tmp_path, "llama")
    alone = load_text(folder, LoadOptions(group=Group(1)))
    assert alone.info == load_text(folder, LoadOptions()).info


def test_a_follower_has_no_tower(tmp_path: Path) -> None:
    folder = build(tmp_path, "qwen3_vl")
    leader, follower = (load_model(folder, LoadOptions(group=Group(2, r))) for r in range(2))
    assert leader.vision_tower.parameters()
    assert not follower.vision_tower.parameters()
    with pytest.raises(RuntimeError, match="in the leader"):
        follower.vision_tower(mx.zeros((1,)))


class Attention(nn.Module):
    """With a parameter per head that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = self.n_kv_heads = 4
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self[name] = nn.Linear(16, 16, bias=False)
        self.slopes = mx.ones((4,))


@dataclass
class Layered:
    layers: list[nn.Module]


def test_a_part_that_is_more_than_it_seems_is_refused() -> None:
    layer = nn.Module()
    layer.self_attn = Attention()
    with pytest.raises(UnsupportedModel, match="`self_attn` of layer 0 is of no known kind"):
        shard(Layered([layer]), Group(2), "odd")
    del layer.self_attn["slopes"]
    layer.self_attn.q_norm = nn.RMSNorm(16)  # over all heads at once
    with pytest.raises(UnsupportedModel, match="`q_norm` is not of one head"):
        shard(Layered([layer]), Group(2), "odd")
