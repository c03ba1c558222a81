"""EAGLE-3 heads: mlx-vlm's numbers, every answer as without them, and reasons for refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import eagle3

from mlx_provider import BadRequest
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.protocol.options import ModelOptions
from mlx_provider.records import DraftOptions, DraftRow
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider_mtp import mlx_drafters
from mlx_provider_mtp.drafting import HeadDrafting

from .company import (
    IMAGES,
    SAMPLED,
    SCENARIOS,
    Arrival,
    accepted,
    check,
    check_steady,
    drafted,
    drawn,
    plain,
    served,
    target,
)

TinyModels = Callable[..., Any]
EAGLE = next(drafter for drafter in mlx_drafters() if drafter.name == "eagle3")
HIDDEN, VOCAB, DRAFT_VOCAB = 64, 384, 96
TEXT = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True)
class Head:
    """A checkpoint, and mlx-vlm's own drafter with the same weights."""

    options: DraftOptions
    module: Any


def write(folder: Path, module: Any, config: dict[str, Any], **renamed: str) -> Head:
    folder.mkdir(exist_ok=True)
    weights = dict(tree_flatten(module.parameters()))
    for name, other in renamed.items():
        weights = {key.replace(name, other): each for key, each in weights.items()}
    weights |= {"t2d": mx.zeros((VOCAB,), mx.bool_)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return Head(DraftOptions(model=folder), module)


def made(folder: Path, *, layers: int = 1, draft_vocab: int = DRAFT_VOCAB, **more: Any) -> Head:
    """A head with random weights, in the form of `speculators`."""
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": TEXT | {"num_hidden_layers": layers},
        "draft_vocab_size": draft_vocab,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    } | more
    module = eagle3.Model(eagle3.ModelConfig.from_dict(config))
    rng = np.random.default_rng(7)
    module.update(drawn(module.parameters(), rng))
    if module.d2t is not None:
        module.d2t = mx.arange(draft_vocab, dtype=mx.int32) * 3
    return write(folder, module, config)


def seeing(folder: Path, found: Any) -> Head:
    """A head that passes on the embedding of the last token, and a little of the states: what
    follows a token of a foreseeable model hangs mostly on that token."""
    head = made(folder, draft_vocab=VOCAB)
    module, target = head.module, found.model.model
    language = getattr(target, "language_model", target)
    (layer,) = module.layers
    none, one = mx.zeros((HIDDEN, HIDDEN)), mx.eye(HIDDEN)
    layer.self_attn.q_proj.weight = layer.self_attn.k_proj.weight = mx.concatenate(
        [4 * one, none], 1
    )
    layer.self_attn.v_proj.weight = mx.concatenate([one, 0.05 * one], 1)
    layer.self_attn.o_proj.weight = one
    layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    module.fc.weight = mx.concatenate([none, none, 0.05 * one], 1)
    for norm in (layer.input_layernorm, layer.hidden_norm):
        norm.weight = mx.ones((HIDDEN,))
    module.norm.weight = language.model.norm.weight.astype(mx.float32)
    module.lm_head.weight = plain(language.lm_head)
    config = json.loads((folder / "config.json").read_text())
    return write(folder, module, config)


def states(rng: np.random.Generator, tokens: int) -> mx.array:
    return mx.array(rng.standard_normal((tokens, 3 * HIDDEN)).astype(np.float32))


@pytest.mark.parametrize(
    ("layers", "more"),
    [
        (1, {}),
        (2, {"norm_before_residual": True, "norm_before_fc": True}),
        (1, {"draft_vocab": VOCAB, "tie_word_embeddings": True, "embed_requires_grad": True}),
    ],
)
def test_guesses_are_those_of_mlx_vlm(
    tiny_target: Any, tmp_path: Path, layers: int, more: dict[str, Any]
) -> None:
    """Behind fresh tokens, and behind more of them once its own guesses are gone."""
    head = made(tmp_path / "eagle", layers=layers, **more)
    ours = EAGLE.start(tiny_target.folder, tiny_target.model, head.options)
    assert EAGLE.layers(ours) == (0, 1, 2)
    theirs, rng = head.module, np.random.default_rng(3)
    if not more.get("embed_requires_grad"):
        theirs.embed_tokens = tiny_target.model.model.model.embed_tokens
    theirs._cache = theirs.make_cache()
    row = DraftRow(rng.integers(20, 300, 9).tolist(), wanted=4, fresh=8, hidden=states(rng, 8))
    for _ in range(2):
        fresh = mx.array([row.tokens[-row.fresh :]])
        (guess,) = ours.propose([row])
        assert guess is not None
        theirs._next_position = theirs._cache[0].offset
        assert row.hidden is not None
        state, wanted = theirs._forward_tokens(fresh, row.hidden[None], mx.int32)[:, -1:], []
        for _ in range(4):
            token = theirs._sample(theirs._logits(state), None, mx.int32, True)
            wanted.append(int(token.item()))
            state = theirs._forward_tokens(token, state, mx.int32)
        assert list(guess) == wanted
        for cache in theirs._cache:
            cache.trim(4)
        more_tokens = rng.integers(20, 300, 2).tolist()
        row.tokens, row.fresh, row.hidden = row.tokens + more_tokens, 2, states(rng, 2)


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
    head = seeing(tmp_path / "eagle", tiny_target)
    speculation = drafted(EAGLE, tiny_target, head.options)
    arrivals, mixes = SCENARIOS[scenario], scenario == "staggered"
    requests = served(tiny_target.model, arrivals, speculation=speculation, mixes=mixes)
    check(tiny_target.model, arrivals, requests)
    assert 0.02 < accepted(requests) < 0.98


@pytest.mark.sweep
def test_drafts_that_never_hold(tiny_target: Any, tmp_path: Path) -> None:
    head = made(tmp_path / "eagle")
    speculation = drafted(EAGLE, tiny_target, head.options)
    requests = served(tiny_target.model, SCENARIOS["six"][:3], speculation=speculation)
    check(tiny_target.model, SCENARIOS["six"][:3], requests)
    assert accepted(requests) < 0.1


def test_a_hybrid_model_with_images(tiny: TinyModels, tmp_path: Path) -> None:
    found = target(tiny, "qwen3_5")
    head = seeing(tmp_path / "eagle", found)
    requests = served(found.model, IMAGES, speculation=drafted(EAGLE, found, head.options))
    check(found.model, IMAGES, requests)
    assert all(request.drafted for request in requests[:-1])


def test_prefix_hits(tiny_target: Any, tmp_path: Path) -> None:
    head = seeing(tmp_path / "eagle", tiny_target)
    kept = PrefixCache(budget=lambda: 2**22)
    arrivals = [Arrival(0, 90, 0), Arrival(20, 90, 0), Arrival(21, 90, 0, 14, SAMPLED)]
    for _ in range(2):
        speculation = drafted(EAGLE, tiny_target, head.options)
        requests = served(tiny_target.model, arrivals, speculation=speculation, prefix_cache=kept)
    check(tiny_target.model, arrivals, requests)
    assert all(request.cached for request in requests)
    assert accepted(requests) > 0.1


def test_four_bits(tiny: TinyModels, tmp_path: Path) -> None:
    """Model and head."""
    found = target(tiny, bits=4)
    head = seeing(tmp_path / "eagle", found)
    nn.quantize(head.module, group_size=32, bits=4)
    config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    write(tmp_path / "eagle", head.module, config)
    arrivals = [replace(each, max_tokens=9) for each in SCENARIOS["six"][:3]]
    requests = served(found.model, arrivals, speculation=drafted(EAGLE, found, head.options))
    check(found.model, arrivals, requests)
    assert accepted(requests) > 0.1


def test_bfloat16(tiny: TinyModels, tmp_path: Path) -> None:
    found = target(tiny, dtype="bfloat16")
    head = seeing(tmp_path / "eagle", found)
    arrivals = [replace(each, max_tokens=8) for each in SCENARIOS["six"][:3]]
    requests = check_steady(found.model, arrivals, drafted(EAGLE, found, head.options))
    assert accepted(requests) > 0.1


def test_the_form_that_sglang_reads_is_the_same_head(tiny_target: Any, tmp_path: Path) -> None:
    one = made(tmp_path / "one", eagle_aux_hidden_state_layer_ids=None)
    flat = TEXT | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    write(tmp_path / "other", one.module, flat, **{"layers.0.": "midlayer."})
    rng = np.random.default_rng(5)
    given = DraftRow([5, 6, 7, 8], wanted=5, fresh=3, hidden=states(rng, 3))
    guesses = []
    for name in ("one", "other"):
        options = DraftOptions(model=tmp_path / name)
        assert EAGLE.refuses(tiny_target.folder, tiny_target.model, options) == ""
        drafting = EAGLE.start(tiny_target.folder, tiny_target.model, options)
        assert EAGLE.layers(drafting) == (1, 1, 0)  # of four: behind 2, in the middle, behind 1
        (guess,) = drafting.propose([replace(given, state=None)])
        guesses.append(list(guess or ()))
    assert guesses[0] == guesses[1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"target_hidden_size": 128}, "its hidden size is 128, here it is 64"),
        ({"transformer_layer_config": TEXT | {"vocab_size": 500}}, "its vocabulary is 500, here"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads layer 8 of a model that has 4"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "layers that are read is 2, here it is 3"),
        ({"transformer_layer_config": TEXT | {"num_hidden_layers": 9**9}}, "at most 8 are"),
        ({"transformer_layer_config": TEXT | {"num_attention_heads": "x"}}, "cannot be read"),
        ({"transformer_layer_config": TEXT | {"intermediate_size": -4}}, "cannot be read"),
        ({"transformer_layer_config": 5}, "its config cannot be read"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, "a way that is not known"),
        ({"speculators_model_type": "medusa"}, "holds no EAGLE-3 head"),
    ],
)
def test_a_head_of_another_model_is_refused_with_a_reason(
    tiny_target: Any, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    head = made(tmp_path / "eagle")
    config = json.loads((tmp_path / "eagle" / "config.json").read_text()) | changes
    (tmp_path / "eagle" / "config.json").write_text(json.dumps(config))
    assert told in EAGLE.refuses(tiny_target.folder, tiny_target.model, head.options)


def test_without_a_folder_it_asks_for_one(tiny_target: Any) -> None:
    assert "draft_model" in EAGLE.refuses(tiny_target.folder, tiny_target.model, DraftOptions())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fc.weight": None}, r"fc.weight is missing, and should be \(64, 192\)"),
        ({"lm_head.weight": mx.zeros((5, 64))}, r"lm_head.weight is \(5, 64\), and should be"),
        ({"other.weight": mx.zeros((5,))}, r"other.weight is \(5,\), and should be absent"),
    ],
)
def test_weights_that_do_not_fit_are_told(
    tiny_target: Any, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    head = made(tmp_path / "eagle")
    path = str(tmp_path / "eagle" / "model.safetensors")
    weights: Any = mx.load(path)
    changed = {name: each for name, each in (weights | change).items() if each is not None}
    mx.eval(list(changed.values()))
    mx.save_safetensors(path, changed)
    with pytest.raises(BadRequest, match=told):
        EAGLE.start(tiny_target.folder, tiny_target.model, head.options)


def test_the_models_embedding_is_not_stored_twice(tiny_target: Any, tmp_path: Path) -> None:
    head = made(tmp_path / "eagle")
    ours = EAGLE.start(tiny_target.folder, tiny_target.model, head.options)
    assert isinstance(ours, HeadDrafting)
    names = [name for name, _ in tree_flatten(ours.head.module.parameters())]  # type: ignore[attr-defined]
    assert not any("embed_tokens" in name for name in names)
    assert EAGLE.keeps(ours) >= ours.kv_bytes + 4096 * 3 * HIDDEN * 4


def test_auto_takes_the_head_in_the_folder_that_the_operator_names(
    tiny_target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head of another model is warned of in one line, with the reason of each drafter."""
    options = ModelOptions(draft_model=str(tmp_path / "eagle"))
    registry, found = PluginRegistry.discover({}), []
    for changes in ({}, {"target_hidden_size": 128}):
        made(tmp_path / "eagle", **changes)
        with caplog.at_level(logging.WARNING):
            found += [drafts_of(registry, tiny_target.folder, tiny_target.model, options).drafter]
    assert found == ["eagle3 + lookup", "lookup"]
    (line,) = caplog.messages
    assert "drafter eagle3: it was trained for another model" in line
