"""DFlash 2: mlx-vlm's numbers, every answer as without it, and reasons for refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import DFlashDraftModel, dflash2

from mlx_provider import BadRequest
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.protocol.options import ModelOptions
from mlx_provider.records import DraftOptions, DraftRow
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider_mtp import mlx_drafters
from mlx_provider_mtp.dflash2 import BlockDrafting
from mlx_provider_mtp.row_states import WINDOW

from .company import (
    IMAGES,
    SAMPLED,
    SCENARIOS,
    Arrival,
    accepted,
    check,
    check_steady,
    check_unread,
    drafted,
    drawn,
    plain,
    served,
    target,
)

TinyModels = Callable[..., Any]
DFLASH = next(drafter for drafter in mlx_drafters() if drafter.name == "dflash2")
HIDDEN, VOCAB, LAYERS, MASK = 64, 384, 4, 7
CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "num_target_layers": LAYERS,
}
BLOCK = {
    "block_size": 8,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 2],
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": HIDDEN,
    "selector_top_k": 12,
}


def made(folder: Path, *, top_k: int = 12, **more: Any) -> Any:
    """mlx-vlm's drafter with random weights, stored in a folder."""
    config = CONFIG | {"dflash_config": BLOCK | {"selector_top_k": top_k}} | more
    module = dflash2.Model(dflash2.ModelConfig.from_dict(config))
    module.update(drawn(module.parameters(), np.random.default_rng(7)))
    return write(folder, module, config)


def write(folder: Path, module: Any, config: dict[str, Any]) -> Any:
    folder.mkdir(exist_ok=True)
    weights = {
        name.replace("codebook.weight", "codebook"): value
        for name, value in tree_flatten(module.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return module


def seeing(folder: Path, found: Any) -> DraftOptions:
    """A drafter whose selector knows what follows a token, as it hangs mostly on that token in a
    foreseeable model; attention to the states adds little."""
    module, whole = made(folder, top_k=VOCAB), found.model.model
    language = getattr(whole, "language_model", whole)
    embedding, matrix = plain(language.model.embed_tokens), plain(language.lm_head)
    for layer in module.layers:
        layer.self_attn.o_proj.weight *= 0.01
        layer.mlp.down_proj.weight *= 0
    module.norm.weight = mx.ones((HIDDEN,))
    masked = mx.fast.rms_norm(embedding[MASK], None, 1e-6)
    selector = module.candidate_selector
    normed = mx.fast.rms_norm(embedding, language.model.norm.weight.astype(mx.float32), 1e-6)
    selector.predecessor_codebook.weight = normed
    selector.successor_codebook.weight = matrix
    selector.hidden_projection.weight = mx.broadcast_to(20 * masked / HIDDEN, (HIDDEN, HIDDEN))
    write(folder, module, json.loads((folder / "config.json").read_text()))
    return DraftOptions(model=folder)


def states(rng: np.random.Generator, tokens: int) -> mx.array:
    return mx.array(rng.standard_normal((tokens, 2 * HIDDEN)).astype(np.float32))


def started(found: Any, folder: Path) -> BlockDrafting:
    drafting = DFLASH.start(found.folder, found.model, DraftOptions(model=folder))
    assert isinstance(drafting, BlockDrafting)
    return drafting


def test_guesses_are_those_of_mlx_vlm(tiny_target: Any, tmp_path: Path) -> None:
    """A block behind some states, and more behind new ones."""
    theirs = made(tmp_path / "d")
    DFlashDraftModel.bind(theirs, tiny_target.model.model)
    ours, cache, rng = started(tiny_target, tmp_path / "d"), theirs.make_cache(), (
        np.random.default_rng(3))  # fmt: skip
    assert DFLASH.layers(ours) == (0, 2)
    row = DraftRow(rng.integers(20, 300, 40).tolist(), fresh=39, hidden=states(rng, 39))
    seen = []
    for wanted in (4, 7, 1):
        row.wanted = wanted
        (guess,) = ours.propose([row])
        assert row.hidden is not None
        want = theirs.draft_block(row.tokens[-1], row.hidden[None], cache, 1 + wanted, None)
        seen += list(guess)
        assert list(guess) == want[0].tolist()
        row.tokens, row.fresh = [*row.tokens, *rng.integers(20, 300, 3).tolist()], 3
        row.hidden = states(rng, 3)
    assert len(set(seen)) > 4


def test_tokens_without_states_keep_their_places(tiny_target: Any, tmp_path: Path) -> None:
    theirs = made(tmp_path / "d")
    DFlashDraftModel.bind(theirs, tiny_target.model.model)
    theirs.config.draft_window_size = WINDOW
    ours, cache = started(tiny_target, tmp_path / "d"), theirs.make_cache()
    rng = np.random.default_rng(4)
    row = DraftRow(rng.integers(20, 300, 30).tolist(), 7, 9, states(rng, 9))
    for _ in range(4):
        (guess,) = ours.propose([row])
        assert row.hidden is not None
        want = theirs.draft_block(row.tokens[-1], row.hidden[None], cache, 8, None)
        assert list(guess) == want[0].tolist()
        row.tokens, row.fresh, row.hidden = row.tokens + [5] * 20, 2, states(rng, 2)
        for layer in cache:
            layer.offset += 18


def test_guesses_behind_an_unread_result_are_those_behind_its_tokens(
    tiny_target: Any, tmp_path: Path
) -> None:
    made(tmp_path / "d")
    ahead, told = (started(tiny_target, tmp_path / "d") for _ in range(2))

    def row(rng: np.random.Generator, tokens: int, fresh: int) -> DraftRow:
        return DraftRow(rng.integers(20, 300, tokens).tolist(), 3, fresh, states(rng, fresh))

    check_unread(ahead, told, row)


@pytest.mark.parametrize("window", [None, 64])
def test_a_row_takes_what_it_is_charged(
    tiny_target: Any, tmp_path: Path, window: int | None
) -> None:
    made(tmp_path / "d", draft_window_size=window)
    drafting, rng = started(tiny_target, tmp_path / "d"), np.random.default_rng(2)
    row, sizes = DraftRow([5] * 600, 3, 512, states(rng, 512)), []
    tight = BlockDrafting(drafting.module, "it", kv_bytes=1)
    for fresh in (*[512] * 5, *[80] * 20):
        drafting.propose([row])
        kept = [each for cache in row.state.states.caches for each in (cache.keys, cache.values)]
        sizes.append(sum(each.nbytes for each in kept))
        row.tokens, row.fresh = row.tokens + [6] * fresh, fresh
        row.hidden = states(rng, fresh)
    assert tight.kv_bytes // 2 < max(sizes) <= tight.kv_bytes
    other = DraftRow([5, 6], 1, 1, states(rng, 1))
    assert [len(each) for each in tight.propose([replace(row, state=None), other])] == [3, 0]


@pytest.mark.parametrize(
    "scenario",
    [
        "staggered",
        *(pytest.param(n, marks=pytest.mark.sweep) for n in ("solo", "six", "cancelled")),
    ],
)
def test_everybody_gets_the_tokens_of_plain_decoding(
    tiny_target: Any, tmp_path: Path, scenario: str
) -> None:
    """Drafts are accepted and rejected, alone and in batches that change."""
    speculation = drafted(DFLASH, tiny_target, seeing(tmp_path / "d", tiny_target))
    arrivals, mixes = SCENARIOS[scenario], scenario == "staggered"
    requests = served(tiny_target.model, arrivals, speculation=speculation, mixes=mixes)
    check(tiny_target.model, arrivals, requests)
    assert 0.02 < accepted(requests) < 0.98


@pytest.mark.sweep
def test_drafts_that_never_hold(tiny_target: Any, tmp_path: Path) -> None:
    made(tmp_path / "d")
    speculation = drafted(DFLASH, tiny_target, DraftOptions(model=tmp_path / "d"))
    requests = served(tiny_target.model, SCENARIOS["six"][:2], speculation=speculation)
    check(tiny_target.model, SCENARIOS["six"][:2], requests)
    assert accepted(requests) < 0.1


def test_a_hybrid_model_with_images_and_a_cached_prefix(tiny: TinyModels, tmp_path: Path) -> None:
    found, kept = target(tiny, "qwen3_5"), PrefixCache(budget=lambda: 2**22)
    options, arrivals = seeing(tmp_path / "d", found), [*IMAGES[:2], Arrival(9, 90, 0, 9)]
    for _ in range(2):
        speculation = drafted(DFLASH, found, options)
        requests = served(found.model, arrivals, speculation=speculation, prefix_cache=kept)
    check(found.model, arrivals, requests)
    assert requests[-1].cached
    assert all(request.drafted for request in requests)


@pytest.mark.parametrize("form", [{"bits": 4}, {"dtype": "bfloat16"}])
def test_other_formats(tiny: TinyModels, tmp_path: Path, form: dict[str, Any]) -> None:
    """Of model and drafter."""
    found = target(tiny, **form)
    options = seeing(tmp_path / "d", found)
    if "bits" in form:
        module = made(tmp_path / "other", top_k=VOCAB)
        module.load_weights(
            [*module.sanitize(mx.load(str(tmp_path / "d" / "model.safetensors"))).items()]  # type: ignore[arg-type]
        )
        nn.quantize(module, group_size=32, bits=4, class_predicate=lambda name, each: (
            isinstance(each, nn.Linear)))  # fmt: skip
        write(tmp_path / "d", module, json.loads((tmp_path / "d" / "config.json").read_text()))
    arrivals = [
        replace(each, max_tokens=9)
        for each in [*SCENARIOS["six"][:2], Arrival(2, 9, 4, 9, SAMPLED)]
    ]
    requests = check_steady(found.model, arrivals, drafted(DFLASH, found, options))
    assert accepted(requests) > 0.05


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": 128}, "its hidden size is 128, here it is 64"),
        ({"vocab_size": 500}, "its vocabulary is 500, here it is 384"),
        ({"num_target_layers": 9}, "its number of layers is 9, here it is 4"),
        ({"num_hidden_layers": 9**9}, "at most 64 are served"),
        ({"num_hidden_layers": "x"}, "its config cannot be read"),
        ({"dflash_config": None}, "its config cannot be read"),
        ({"dflash_config": BLOCK | {"target_layer_ids": [9]}}, "its config cannot be read"),
        ({"architectures": ["Other"]}, "holds no DFlash 2 drafter"),
    ],
)
def test_a_drafter_of_another_model_is_refused_with_a_reason(
    tiny_target: Any, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    config = CONFIG | {"dflash_config": BLOCK} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = DraftOptions(model=tmp_path)
    assert told in DFLASH.refuses(tiny_target.folder, tiny_target.model, options)
    assert "draft_model" in DFLASH.refuses(tiny_target.folder, tiny_target.model, DraftOptions())


def test_weights_that_do_not_fit_are_told(tiny_target: Any, tmp_path: Path) -> None:
    module = made(tmp_path / "d")
    module.fc.weight = mx.zeros((5, 5))
    write(tmp_path / "d", module, json.loads((tmp_path / "d" / "config.json").read_text()))
    with pytest.raises(BadRequest, match=r"fc.weight is \(5, 5\), and should be \(64, 128\)"):
        started(tiny_target, tmp_path / "d")


def test_auto_takes_the_drafter_in_the_folder_that_the_operator_names(
    tiny_target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others that read such folders refuse it, which nobody need know."""
    made(tmp_path / "d")
    registry = PluginRegistry.discover({})
    with caplog.at_level(logging.WARNING):
        options = ModelOptions(draft_model=str(tmp_path / "d"))
        found = drafts_of(registry, tiny_target.folder, tiny_target.model, options)
    assert found.drafter == "dflash2 + lookup"
    assert found.speculation is not None
    assert found.speculation.shows is not None
    assert caplog.messages == []
