"""What a plan says of memory, against what tiny models take, whole and split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_provider.engine.execution import solo_rows
from mlx_provider.engine.memory import profile
from mlx_provider.errors import BadRequest, UnsupportedModel
from mlx_provider.families.caches import text_cache
from mlx_provider.families.sharding import BY_LAYERS, shard
from mlx_provider.planning import machines, subject
from mlx_provider.planning.group import TOKEN_BYTES, group
from mlx_provider.planning.split import Ranks, sizes, split
from mlx_provider.records import LoadOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.quantised import quantise
from mlx_provider.testing.tiny_models import build
from mlx_provider.upstream import mlx_lm

PAIR = machines("2x64GB:400GB/s")
TOKENS = 40
"""More than any tiny window holds."""


def folder_of(path: Path, family: str, *, bits: bool = False, **overrides: Any) -> Path:
    folder = build(path / "m", family, **overrides)
    return quantise(folder, family) if bits else folder


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_one_rank_holds_what_a_loaded_model_does(tmp_path: Path, family: str, bits: bool) -> None:
    folder = folder_of(tmp_path, family, bits=bits)
    registry = PluginRegistry.discover()
    asked = subject(str(folder))
    model = registry.family_for(asked.config)[0].load(folder, LoadOptions())
    [rank] = group(asked, PAIR[:1]).ranks
    assert rank.weights == model.info.weights_bytes
    tokens = solo_rows.some_tokens(model, TOKENS, 0)
    held = profile(solo_rows.prefilled(model, model.make_cache, tokens), TOKENS)
    windows = sum(window * each for window, each in held.windows)
    assert rank.need.kv_per_token == held.token_bytes
    assert rank.need.per_row == held.state_bytes + windows


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5_text"])
def test_a_rank_holds_what_upstream_loads_on_it(tmp_path: Path, family: str, bits: bool) -> None:
    folder = folder_of(tmp_path, family, bits=bits)
    loaded = mlx_lm.load(folder).model
    loaded.shard(Ranks(2))
    arrays = [array for _, array in tree_flatten(loaded.parameters())]
    mx.eval(arrays)
    found = group(subject(str(folder)), PAIR)
    assert {rank.weights for rank in found.ranks} == {sum(a.nbytes for a in arrays)}
    assert found.ranks[0].share.split > 0


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "norm_topk_prob": True,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize("quantization", [{}, {"quantization": {"group_size": 32, "bits": 4}}])
def test_experts_are_split_and_read_as_far_as_they_are_taken(
    tmp_path: Path, quantization: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.distributed, "all_sum", Exchanged().all_sum)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_MOE | quantization))
    asked = subject(str(path))
    found, loaded = group(asked, PAIR), asked.model()
    loaded.shard(Ranks(2))
    arrays = dict(tree_flatten(loaded.parameters()))
    cache = text_cache(loaded)
    mx.eval(loaded.layers[0].self_attn(mx.zeros((1, TOKENS, 64)), cache=cache[0]))
    experts = sum(array.nbytes for path, array in arrays.items() if ".switch_mlp." in path)
    assert found.ranks[0].share.weights(1) == sum(array.nbytes for array in arrays.values())
    assert found.ranks[0].need.kv_per_token == 3 * profile(cache[:1], TOKENS).token_bytes
    assert (found.ranks[0].share.experts, found.ranks[0].share.taken) == (experts, 0.5)
    assert found.ranks[0].share.read_by(1) == found.ranks[0].share.read + experts / 2
    assert found.ranks[0].share.read_by(2) == found.ranks[0].share.read + experts * 3 / 4


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5_text"])
def test_a_rank_keeps_and_exchanges_what_upstream_does(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path / "m", family)
    model, exchanged = mlx_lm.load(folder).model, Exchanged()
    monkeypatch.setattr(mx.distributed, "all_sum", exchanged.all_sum)
    monkeypatch.setattr(mx.distributed, "all_gather", exchanged.all_gather)
    model.shard(Ranks(2))
    cache = text_cache(model)
    mx.eval(model(mx.arange(TOKENS)[None], cache=cache))
    held = profile(cache, TOKENS)
    exchanged.clear()
    mx.eval(model(mx.array([[1]]), cache=cache))

    found = group(subject(str(folder)), PAIR)
    windows = sum(window * each for window, each in held.windows)
    for rank in found.ranks:
        assert rank.need.kv_per_token == held.token_bytes
        assert rank.need.per_row == held.state_bytes + windows
    assert exchanged.sums == [found.sum_bytes] * found.split.sums
    assert bool(exchanged.gathered) == found.split.gathers_logits
    assert found.token_bytes == sum(exchanged.sums) + 2 * sum(exchanged.gathered) + TOKEN_BYTES


ODD = {"num_attention_heads": 5, "num_key_value_heads": 5}
ODD_STATES = ODD | {"linear_num_key_heads": 5, "linear_num_value_heads": 5}
LAYERED = [
    ("qwen3", ODD | {"model_type": "qwen2", "head_dim": 12}),
    ("qwen3_next", ODD_STATES),
]


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize(("family", "sizes"), LAYERED, ids=["qwen2", "qwen3_next"])
def test_a_rank_of_layers_holds_and_exchanges_what_it_does_when_loaded(
    tmp_path: Path,
    family: str,
    sizes: dict[str, Any],
    bits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks, of unlike layers, one after another."""
    folder, passed = folder_of(tmp_path, family, bits=bits, **sizes), Exchanged()
    for name in ("send", "recv_like", "all_gather"):
        monkeypatch.setattr(mx.distributed, name, getattr(passed, name))
    found = group(subject(str(folder)), machines("3x64GB:400GB/s"))
    layers = []
    for rank in found.ranks:
        model = mlx_lm.load(folder, lazy=True).model
        assert shard(model, Ranks(3, rank.number), family) == BY_LAYERS
        assert rank.weights == sum(array.nbytes for _, array in tree_flatten(model.parameters()))
        cache = text_cache(model)
        mx.eval(model(mx.arange(TOKENS)[None], cache=cache))
        held = profile(cache, TOKENS)
        layers.append(len(cache))
        assert (rank.need.kv_per_token, rank.need.per_row) == (held.token_bytes, held.state_bytes)
    assert [len(each) for each in found.split.layers] == layers
    assert passed.sent == [TOKENS * found.sum_bytes] * found.split.handed
    assert found.token_bytes == 3 * found.sum_bytes + TOKEN_BYTES
    assert found.collectives == 2 + 1 + 1
    alone = group(subject(str(folder)), PAIR[:1]).ranks[0]
    whole = alone.need.kv_per_token, alone.need.per_row
    assert whole == tuple(
        sum(getattr(rank.need, name) for rank in found.ranks)
        for name in ("kv_per_token", "per_row")
    )


class Exchanged:
    """Collectives of a rank without others: their bytes."""

    def __init__(self) -> None:
        self.sums: list[int] = []
        self.gathered: list[int] = []
        self.sent: list[int] = []

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def all_sum(self, array: mx.array, **_: Any) -> mx.array:
        self.sums.append(array.nbytes)
        return array

    def send(self, array: mx.array, to: int, **_: Any) -> mx.array:
        self.sent.append(array.nbytes)
        return array

    def recv_like(self, array: mx.array, of: int, **_: Any) -> mx.array:
        return mx.zeros_like(array)

    def all_gather(self, array: mx.array, **_: Any) -> mx.array:
        self.gathered.append(array.nbytes)
        return mx.concatenate([array, array])


def test_every_array_of_a_tower_stays_on_the_first_rank(tmp_path: Path) -> None:
    found = group(subject(str(build(tmp_path / "m", "qwen3_vl"))), PAIR)
    first, second = found.ranks
    assert first.weights - second.weights == found.ranks[0].share.tower > 0


def test_a_config_alone_tells_what_its_folder_does(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3_vl", bits=True)
    alone = tmp_path / "config.json"
    alone.write_bytes((folder / "config.json").read_bytes())
    of_file, of_folder = (group(subject(str(each)), PAIR) for each in (alone, folder))
    towers = of_folder.ranks[0].share.tower, of_file.ranks[0].share.tower
    assert [r.need for r in of_file.ranks][1] == [r.need for r in of_folder.ranks][1]
    assert towers[0] <= towers[1]  # converters leave towers as they are, unless told otherwise


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5_text", "qwen3_vl", "gemma3"])
def test_more_ranks_never_need_more_of_each(tmp_path: Path, family: str) -> None:
    asked = subject(str(build(tmp_path / "m", family)))
    groups = [group(asked, machines(f"{count}x16GB:100GB/s")) for count in (1, 2)]
    for context in (1, 300, 5000, 70_000):
        for rows in (1, 4):
            one, two = ([r.takes(context, rows) for r in g.ranks] for g in groups)
            assert max(two) < one[0]
    for rank in groups[1].ranks:
        taken = [rank.takes(context, 2) for context in range(1, 3000, 97)]
        assert taken == sorted(taken)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_longest_context_fits_and_a_longer_one_does_not(tmp_path: Path, rows: int) -> None:
    found = group(subject(str(build(tmp_path / "m", "llama"))), machines("2x0.01GB:1GB/s"))
    longest = found.longest(None, rows)
    assert found.fits(longest, rows)
    assert not found.fits(longest + 1, rows)


def test_key_value_heads_are_repeated_where_ours_are_split(tmp_path: Path) -> None:
    asked = subject(str(build(tmp_path / "m", "qwen3_vl")))
    [two, *_], [four, *_] = (group(asked, PAIR * n).ranks for n in (1, 2))
    assert two.need.kv_per_token == four.need.kv_per_token  # one of two heads on each
    model = asked.model()
    kept = [path for path in sizes(model) if path.endswith(("k_proj.weight", "v_proj.weight"))]
    halves, quarters = (split(asked.model(), ranks).held(0) for ranks in (2, 4))
    assert {halves[p] - quarters[p] for p in kept if ".layers." in p} == {0}


@pytest.mark.parametrize(
    ("family", "count", "told"),
    [
        ("llama", 3, "heads do not divide by 3"),
        ("llama", 64, "heads do not divide"),
        ("llama", 4, "2 KV heads do not divide by 4"),
        ("gpt_oss", 4, "KV heads do not divide by 4"),
        ("qwen3_5", 4, "heads of a recurrent state do not divide by 4"),
    ],
)
def test_heads_that_do_not_divide_are_told(
    tmp_path: Path, family: str, count: int, told: str
) -> None:
    asked = subject(str(build(tmp_path / "m", family)))
    with pytest.raises(BadRequest, match=told):
        group(asked, machines(f"{count}x64GB:400GB/s"))


def test_matrices_that_do_not_divide_are_told(tmp_path: Path) -> None:
    asked = subject(str(build(tmp_path / "m", "llama", intermediate_size=127)))
    with pytest.raises(BadRequest, match="cannot be split over 2 ranks"):
        group(asked, PAIR)


def test_a_class_that_nothing_splits_is_told(tmp_path: Path) -> None:
    asked = subject(str(build(tmp_path / "m", "rwkv7")))
    assert split(asked.model(), 1).sums == 0
    with pytest.raises(UnsupportedModel, match="is of no known kind"):
        group(asked, PAIR)
