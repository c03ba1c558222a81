"""Gemma 4's assistants: mlx-vlm's numbers, every answer as without it, and reasons for refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.models.gemma4.config import TextConfig
from mlx_vlm.models.gemma4.language import LanguageModel
from mlx_vlm.speculative.drafters import gemma4_assistant

from mlx_provider import BadRequest, LoadOptions
from mlx_provider.engine.execution import batch_layout
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.speculation.asks import Ask, Asks
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.engine.speculation.speculation import source_of, speculation_of
from mlx_provider.protocol.options import ModelOptions
from mlx_provider.records import DraftOptions, DraftRow, Unread
from mlx_provider.registry import PluginRegistry
from mlx_provider.serving.drafting import drafts_of
from mlx_provider.testing.driver import new_engine, new_request, output_of
from mlx_provider.testing.tiny.models import family_named
from mlx_provider.upstream.cache_classes import stored
from mlx_provider_mtp import mlx_drafters
from mlx_provider_mtp.assistant import AssistantDrafting

from .company import (
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
)

TinyModels = Callable[..., Any]
ASSISTANT = next(drafter for drafter in mlx_drafters() if drafter.name == "assistant")
HIDDEN, VOCAB, WINDOW = 64, 384, 24
TEXT = {
    "model_type": "gemma4_text",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": VOCAB,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "rope_parameters": family_named("gemma4_text").config({})["rope_parameters"],
}
CONFIG = {"model_type": "gemma4_assistant", "backbone_hidden_size": HIDDEN, "text_config": TEXT}
SPARSE = {"use_ordered_embeddings": True, "num_centroids": 32, "centroid_intermediate_top_k": 8}
"""Logits of some clusters of tokens alone."""


def made(folder: Path, **more: Any) -> Any:
    """mlx-vlm's assistant with random weights, stored in a folder."""
    config = json.loads(json.dumps(CONFIG | more))
    module = gemma4_assistant.Model(gemma4_assistant.ModelConfig.from_dict(config))
    module.update(drawn(module.parameters(), np.random.default_rng(7)))
    for layer in module.model.layers:
        layer.self_attn.q_norm.weight *= 6  # so that it matters what attention sees
    if more:
        module.masked_embedding.token_ordering = mx.arange(VOCAB)
    return write(folder, module, CONFIG | more)


def write(folder: Path, module: Any, config: dict[str, Any]) -> Any:
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(module.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return module


def seeing(folder: Path, found: Any) -> DraftOptions:
    """An assistant that mostly goes by the last token, which in a foreseeable model tells most of
    the next one; attention to the model's keys adds little."""
    module, language = made(folder), found.model.model
    eye = mx.eye(HIDDEN)
    module.pre_projection.weight = mx.concatenate([eye, mx.zeros((HIDDEN, HIDDEN))], axis=1)
    for layer in module.model.layers:
        layer.layer_scalar = mx.ones((1,))
        layer.post_attention_layernorm.weight = mx.full((HIDDEN,), 0.05)
        layer.post_feedforward_layernorm.weight = mx.zeros((HIDDEN,))
    module.model.norm.weight = language.model.norm.weight.astype(mx.float32)
    module.model.embed_tokens.weight = plain(language.lm_head)
    write(folder, module, CONFIG)
    return DraftOptions(model=folder)


@pytest.fixture
def found(tiny: TinyModels) -> Any:
    return tiny("gemma4_text", mtp_num_hidden_layers=0)


def started(found: Any, folder: Path) -> AssistantDrafting:
    drafting = ASSISTANT.start(found.folder, found.model, DraftOptions(model=folder))
    assert isinstance(drafting, AssistantDrafting)
    return drafting


@pytest.mark.parametrize("more", [{}, SPARSE], ids=["all tokens", "clusters"])
@pytest.mark.parametrize("length", [9, 60])
def test_guesses_are_those_of_mlx_vlm(
    found: Any, tmp_path: Path, more: dict[str, Any], length: int
) -> None:
    """With the states and keys of mlx-vlm's own Gemma 4, within the window and beyond it."""
    whole = found.model.model
    config = json.loads((found.folder / "config.json").read_text())
    theirs = LanguageModel(TextConfig.from_dict(config))
    weights = [(n, w) for n, w in tree_flatten(whole.parameters()) if "lm_head" not in n]
    theirs.load_weights(weights)
    tokens = np.random.default_rng(3).integers(20, 300, length).tolist()
    out = theirs(
        mx.array([tokens[:-1]]),
        cache=theirs.make_cache(),
        return_hidden=True,
        return_shared_kv=True,
    )
    assistant, known = made(tmp_path / "d", **more).bind(whole), length - 1
    shared = {
        kind: tuple(
            each[..., -WINDOW:, :] if kind == "sliding_attention" else each for each in pair
        )
        for kind, pair in out.shared_kv_states.items()
    }
    assistant.set_shared_kv(shared, known, position=known - 1, kv_valid_len=known)
    hidden = theirs.speculative_draft_hidden(out.hidden_states[-1][:, -1:])
    want = assistant.draft_block(tokens[-1], hidden, None, 8, lambda x: mx.argmax(x, axis=-1))

    cache = whole.make_cache()
    for at in range(0, known, 16):
        states = whole.model(mx.array([tokens[at : min(at + 16, known)]]), cache=cache)
    row = DraftRow(tokens, 7, 1, states[0, -1:], cache=[stored(layer) for layer in cache])
    (guess,) = started(found, tmp_path / "d").propose([row])
    assert list(guess) == want[0].tolist()
    assert len(set(guess)) > 1


@pytest.mark.parametrize(
    "scenario",
    ["staggered", *(pytest.param(n, marks=pytest.mark.sweep) for n in ("six", "cancelled"))],
)
def test_everybody_gets_the_tokens_of_plain_decoding(
    found: Any, tmp_path: Path, scenario: str
) -> None:
    """Drafts are accepted and rejected, alone and in batches that change."""
    speculation = drafted(ASSISTANT, found, seeing(tmp_path / "d", found))
    arrivals, kept = SCENARIOS[scenario][:3], PrefixCache(budget=lambda: 2**22)
    for _ in range(2):
        requests = served(found.model, arrivals, speculation=speculation, prefix_cache=kept)
        check(found.model, arrivals, requests)
        assert 0.02 < accepted(requests) < 0.98


@pytest.mark.parametrize("form", [{"bits": 4}, {"dtype": "bfloat16"}])
def test_other_formats(tiny: TinyModels, tmp_path: Path, form: dict[str, Any]) -> None:
    found = tiny("gemma4_text", mtp_num_hidden_layers=0, **form)
    arrivals = [
        replace(each, max_tokens=9)
        for each in [*SCENARIOS["six"][:2], Arrival(2, 9, 4, 9, SAMPLED)]
    ]
    speculation = drafted(ASSISTANT, found, seeing(tmp_path / "d", found))
    assert accepted(check_steady(found.model, arrivals, speculation)) > 0.02


@pytest.mark.parametrize("lost", [0, 9])
def test_guesses_behind_an_unread_result_are_those_behind_its_tokens(
    found: Any, tmp_path: Path, lost: int
) -> None:
    """`lost`: tokens that the window has let go."""
    made(tmp_path / "d")
    drafting, rng = started(found, tmp_path / "d"), np.random.default_rng(4)
    kinds = drafting._kinds
    tokens, result = (rng.integers(20, 300, count).tolist() for count in (30, 4))

    def arrays(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    wide, narrow = ((arrays(1, 2, 33, d), arrays(1, 2, 33, d)) for d in (32, 16))
    hidden, rows, told = arrays(5, HIDDEN), [], []
    for held in range(4):
        pairs: list[Any] = [None] * (1 + max(kinds.values()))
        pairs[kinds["full_attention"]] = wide
        pairs[kinds["sliding_attention"]] = tuple(each[:, :, lost:] for each in narrow)
        unread = Unread(mx.array(result), mx.array([held]))
        rows.append(DraftRow(tokens, 7, 1, hidden, unread, pairs))
        known = [
            None if pair is None else tuple(each[:, :, : each.shape[2] - 3 + held] for each in pair)
            for pair in pairs
        ]
        row = DraftRow([*tokens, *result[: held + 1]], 7, 2 + held, hidden[: 2 + held], cache=known)
        told += map(list, drafting.propose([row]))
    assert [*map(list, drafting.propose(rows))] == told
    assert len({tuple(own) for own in told}) == 4


class Some(Policy):
    """Drafts for the first rows."""

    drafting = 3

    def wanted(self, rows: Sequence[object], others: int, seconds: object) -> list[Asks]:
        return [(Ask(0, 3),) if at < self.drafting else () for at in range(len(rows))]


def test_rows_without_drafts_stay_joined_beside_one_that_has_some(
    found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeing(tmp_path / "d", found)
    source = source_of(ASSISTANT, started(found, tmp_path / "d"), found.model)
    policy = Some()
    engine = new_engine(
        found.model, speculation=speculation_of([source], found.model, policy=policy)
    )
    requests = [new_request(range(20, 40 + 9 * at), max_tokens=90) for at in range(3)]
    for request in requests:
        engine.submit(request)
    while not all(request.drafted for request in requests):
        engine.step()
    policy.drafting = 1
    joins: list[int] = []
    join = batch_layout.joined
    monkeypatch.setattr(batch_layout, "joined", lambda *args: joins.append(0) or join(*args))
    drafted = requests[0].drafted
    for _ in range(12):
        engine.step()
    assert requests[0].drafted > drafted + 20
    assert len(joins) <= 1


VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.filterwarnings("ignore")  # of the processor's mel filters
def test_a_checkpoint_with_a_vision_part_that_serves_text(tiny: TinyModels, tmp_path: Path) -> None:
    """As published ones are stored, with `modality: text`."""
    text = tiny("gemma4_text", mtp_num_hidden_layers=0, tie_word_embeddings=True)
    folder = shutil.copytree(text.folder, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    above = {"model_type": "gemma4", "text_config": config, "vision_config": VISION}
    (folder / "config.json").write_text(json.dumps(config | above))
    stored: Any = mx.load(str(folder / "model.safetensors"))
    named = {f"language_model.{name}": value for name, value in stored.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), named, metadata={"format": "mlx"})
    family, _ = PluginRegistry.discover({}).family_for(above)
    found = SimpleNamespace(folder=folder, model=family.load(folder, LoadOptions(modality="text")))
    made(tmp_path / "d")
    speculation = drafted(ASSISTANT, found, DraftOptions(model=tmp_path / "d"))
    arrivals = SCENARIOS["six"][:3]
    requests = served(found.model, arrivals, speculation=speculation)
    check(found.model, arrivals, requests)
    assert all(request.drafted for request in requests)
    for request, arrival in zip(requests, arrivals, strict=True):
        (same,) = served(text.model, [arrival])
        assert output_of(request).tokens == output_of(same).tokens


def test_a_row_whose_keys_are_stored_otherwise_has_no_guesses(found: Any, tmp_path: Path) -> None:
    made(tmp_path / "d")
    drafting, empty = started(found, tmp_path / "d"), found.model.make_cache()
    states = mx.zeros((1, HIDDEN))
    for cache in (None, [stored(layer) for layer in empty]):
        assert list(drafting.propose([DraftRow([5, 6], 3, 1, states, cache=cache)])) == [()]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"backbone_hidden_size": 128}, "its hidden size is 128, here it is 64"),
        ({"text_config": TEXT | {"vocab_size": 500}}, "its vocabulary is 500, here it is 384"),
        ({"text_config": TEXT | {"head_dim": 32}}, "its head dim is 32, here it is 16"),
        ({"text_config": TEXT | {"num_hidden_layers": 9**9}}, "at most 64 are served"),
        ({"text_config": TEXT | {"num_hidden_layers": "x"}}, "its config cannot be read"),
        ({"text_config": None}, "its config cannot be read"),
        ({"model_type": "gemma4"}, "holds no Gemma 4 assistant"),
    ],
)
def test_an_assistant_of_another_model_is_refused_with_a_reason(
    found: Any, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    options = DraftOptions(model=tmp_path)
    assert told in ASSISTANT.refuses(found.folder, found.model, options)
    assert "draft_model" in ASSISTANT.refuses(found.folder, found.model, DraftOptions())


def test_a_model_of_another_kind_and_weights_that_do_not_fit_are_told(
    found: Any, tiny: TinyModels, tmp_path: Path
) -> None:
    module = made(tmp_path / "d")
    options = DraftOptions(model=tmp_path / "d")
    other = tiny("qwen3", mtp_num_hidden_layers=0)
    assert "not those of Gemma 4" in ASSISTANT.refuses(other.folder, other.model, options)
    layers = [SimpleNamespace(layer_type="attention")]  # as Granite's
    below = SimpleNamespace(embed_tokens=None, layers=layers)
    language = SimpleNamespace(model=below, args=SimpleNamespace(hidden_size=HIDDEN))
    granite: Any = SimpleNamespace(model=language, info=other.model.info)
    assert "its head dim is 16, here it is None" in ASSISTANT.refuses(tmp_path, granite, options)
    module.pre_projection.weight = mx.zeros((5, 5))
    write(tmp_path / "d", module, CONFIG)
    with pytest.raises(BadRequest, match=r"pre_projection.weight is \(5, 5\), and should be"):
        started(found, tmp_path / "d")


def test_auto_takes_the_assistant_in_the_folder_that_the_operator_names(
    found: Any, tmp_path: Path
) -> None:
    made(tmp_path / "d")
    options = ModelOptions(draft_model=str(tmp_path / "d"))
    drafts = drafts_of(PluginRegistry.discover({}), found.folder, found.model, options)
    assert drafts.drafter == "assistant + lookup"
