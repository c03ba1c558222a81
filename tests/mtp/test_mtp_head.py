"""The head itself: upstream's numbers, every form that checkpoints store it in, and its bytes."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import qwen3_5_mtp

from mlx_provider import BadRequest, LoadOptions
from mlx_provider.families.checkpoint import read_json
from mlx_provider.families.text import load_text
from mlx_provider.records import DraftOptions, DraftRow
from mlx_provider_mtp import refuses, start
from mlx_provider_mtp.checkpoint import read
from mlx_provider_mtp.drafting import WINDOW, HeadDrafting
from mlx_provider_mtp.head import load_head
from tiny import build
from tolerances import logprob_tolerance

TinyModels = Callable[..., Any]
FAMILIES = ("qwen3_5_text", "qwen3_5", "qwen3_5_moe", "qwen3_next")
FILE = "model.safetensors"
NONE = DraftOptions()


def stored(folder: Path) -> dict[str, mx.array]:
    weights: Any = mx.load(str(folder / FILE))
    return {name: value for name, value in weights.items() if name.startswith("mtp.")}


def upstream(tiny: Any) -> Any:
    """mlx-vlm's own drafter with the same weights, bound to the same model."""
    config = read_json(tiny.folder / "config.json")
    text = config.get("text_config", config)
    rope = {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    }
    text = text | {"rope_parameters": rope, "num_experts": text.get("num_experts", 0)}
    given = {"model_type": "qwen3_5_mtp", "text_config": text}
    model = qwen3_5_mtp.Model(qwen3_5_mtp.ModelConfig.from_dict(given))
    weights = [(n.removeprefix("mtp."), v) for n, v in stored(tiny.folder).items()]
    model.load_weights(weights)
    model.bind(tiny.model.model)
    return model


def row(rng: np.random.Generator, tokens: int, fresh: int, hidden: int = 64) -> DraftRow:
    states = mx.array(rng.standard_normal((fresh, hidden)).astype(np.float32))
    text = rng.integers(20, 300, tokens).tolist()
    return DraftRow(text, wanted=3, fresh=fresh, hidden=states)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_the_mtp_head_equal_those_of_mlx_vlm(
    tiny: TinyModels, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over fresh tokens, another one behind it, and the head's own guesses after both."""
    found = tiny(family, foreseeable=False)
    ours = start(found.folder, found.model, NONE)
    assert isinstance(ours, HeadDrafting)
    seen: list[mx.array] = []
    logits = ours.head.logits

    def watched(hidden: mx.array) -> mx.array:
        seen.append(logits(hidden))
        return seen[-1]

    monkeypatch.setattr(ours.head, "logits", watched)
    rng = np.random.default_rng(3)
    given = row(rng, 9, 8)
    want = upstream(found)
    cache, forward = want.make_cache(), want._forward_tokens
    fresh = (given.tokens[-8:], given.hidden)
    for _ in range(2):
        (guess,) = ours.propose([given])
        want._cache, want._next_position = cache, cache[0].offset
        state = forward(mx.array([fresh[0]]), fresh[1][None], mx.int32)[:, -1:]
        for token, got in zip(guess, seen, strict=True):
            expected = want._lm_head_fn(state)[0]
            assert mx.max(mx.abs(got - expected)) < logprob_tolerance()
            assert token == int(mx.argmax(expected))
            state = forward(mx.array([[token]]), state, mx.int32)
        cache[0].trim(3)
        more = row(rng, 2, 2)
        fresh = (more.tokens, more.hidden)
        given.tokens, given.fresh, given.hidden = given.tokens + more.tokens, 2, more.hidden
        seen.clear()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [16, 4])
def test_mtp_drafts_of_rows_equal_each_alone(tiny: TinyModels, family: str, bits: int) -> None:
    found = tiny(family, bits=bits)
    together, apart = (start(found.folder, found.model, NONE) for _ in range(2))
    rng = np.random.default_rng(5)
    rows = [row(rng, 30 + 7 * i, 1 + 3 * i) for i in range(4)]
    alone = [DraftRow(r.tokens, r.wanted, r.fresh, r.hidden) for r in rows]
    for turn in range(3):
        for i, (one, other) in enumerate(zip(rows, alone, strict=True)):
            one.wanted = other.wanted = 1 + (i + turn) % 4
        guesses = [*map(list, together.propose(rows))]
        assert guesses == [[*apart.propose([one])[0]] for one in alone]
        for one, other in zip(rows, alone, strict=True):
            more = row(rng, 2, 2)
            one.tokens = other.tokens = one.tokens + more.tokens
            one.hidden = other.hidden = more.hidden
            one.fresh = other.fresh = 2


def test_a_row_without_hidden_states_gets_no_mtp_drafts(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text")
    drafting = start(found.folder, found.model, NONE)
    rng = np.random.default_rng(1)
    blind = DraftRow([5, 6, 7], wanted=2)
    assert drafting.propose([blind]) == [[]]
    first, second = drafting.propose([blind, row(rng, 5, 2)])
    assert (len(first), len(second)) == (0, 3)


def test_the_mtp_cache_of_a_row_is_bounded_by_its_window(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text")
    drafting = start(found.folder, found.model, NONE)
    rng = np.random.default_rng(2)
    given, most = row(rng, 200, 100), 0
    for _ in range(60):
        assert len(drafting.propose([given])[0]) == 3
        cache = given.state.cache
        most = max(most, cache.keys.shape[2])
        more = row(rng, 100, 100)
        given.tokens, given.hidden = given.tokens + more.tokens, more.hidden
    assert WINDOW < most <= 2 * WINDOW
    assert cache.offset >= WINDOW


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen3_5_text", 16), ("qwen3_5", 4), ("qwen3_5_moe", 4)]
)
def test_an_mtp_head_takes_only_its_memory(tiny: TinyModels, family: str, bits: int) -> None:
    found = tiny(family, bits=bits)
    start(found.folder, found.model, NONE)  # what upstream's classes keep, they keep now
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # a buffer that is taken up again may be larger than what it is for
    before = mx.get_active_memory()
    drafting = start(found.folder, found.model, NONE)
    assert isinstance(drafting, HeadDrafting)
    gc.collect()
    taken = mx.get_active_memory() - before
    own = tree_flatten(drafting.head.module.parameters())
    in_file = sum(value.nbytes for value in stored(found.folder).values())
    assert sum(value.nbytes for _, value in own) == in_file
    assert in_file <= taken <= in_file + 64 * len(own)  # allocations are rounded up


def makers(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """As the makers publish it: gains less one, experts as one tensor or one by one."""
    return {n: v - 1 if n.endswith("norm.weight") else v for n, v in tensors.items()} | {
        n: tensors[n] - 1 for n in tensors if "pre_fc_norm" in n
    }


def fused(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    own, mlp = dict(tensors), "mtp.layers.0.mlp"
    gate, up, down = (
        own.pop(f"{mlp}.switch_mlp.{part}_proj.weight") for part in ("gate", "up", "down")
    )
    return own | {
        f"{mlp}.experts.gate_up_proj": mx.concatenate([gate, up], axis=-2),
        f"{mlp}.experts.down_proj": down,
    }


def one_by_one(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {
        name.replace("switch_mlp", f"experts.{i}"): part
        for name, value in tensors.items()
        for i, part in (enumerate(value) if "switch_mlp" in name else [(0, value)])
    }


def within(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    return {f"language_model.{name}": value for name, value in tensors.items()}


def small_gains(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Gains before the layer as small as trained ones are."""
    return {n: v * 0.27 if "pre_fc_norm" in n else v for n, v in tensors.items()}


PLAIN = [(makers,), (within,), (small_gains,), (small_gains, makers)]
EXPERTS = [*PLAIN, (one_by_one,), (makers, one_by_one), (makers, fused)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *(("qwen3_5", changes) for changes in PLAIN),
        *((family, c) for family in ("qwen3_5_moe", "qwen3_next") for c in EXPERTS),
    ],
)
def test_every_stored_form_of_an_mtp_head_loads_to_equal_tensors(
    tiny: TinyModels, tmp_path: Path, family: str, changes: Any
) -> None:
    tensors = stored(tiny(family).folder)
    before = small_gains(tensors) if small_gains in changes else tensors
    for change in changes:
        tensors = change(tensors)
    halves = [{n: v for n, v in tensors.items() if ("norm" in n) is gain} for gain in (True, False)]
    for name, half in zip(("model-00001", "mtp"), halves, strict=True):
        mx.save_safetensors(str(tmp_path / f"{name}.safetensors"), half)
    found = read(tmp_path, mx.float32)
    want = {name.removeprefix("mtp."): value for name, value in before.items()}
    assert found.keys() == want.keys()
    assert all(mx.allclose(found[name], want[name], atol=1e-6) for name in want)


def folder_with(tiny: Any, target: Path, tensors: dict[str, mx.array], **config: Any) -> Path:
    """The checkpoint with another head."""
    shutil.copytree(tiny.folder, target)
    weights: Any = mx.load(str(target / FILE))
    kept = {n: v for n, v in weights.items() if not n.startswith("mtp.")} | tensors
    mx.eval(list(kept.values()))
    mx.save_safetensors(str(target / FILE), kept, {"format": "mlx"})
    changed = read_json(target / "config.json") | config
    (target / "config.json").write_text(json.dumps(changed))
    return target


def test_a_checkpoint_without_a_head_is_refused(tiny: TinyModels, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", "qwen3_5_text")
    assert refuses(folder, tiny("qwen3_5_text").model, NONE) == "no MTP head in the checkpoint"
    assert refuses(tiny("qwen3_5_text").folder, tiny("qwen3_5_text").model, NONE) == ""


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        ("mtp.fc.weight_scale_inv", {}, "a form that is not known (fc.weight_scale_inv)"),
        ("mtp.embed_tokens.weight", {}, "a form that is not known (embed_tokens.weight)"),
        ("mtp.layers.1.norm.weight", {}, "a form that is not known (layers.1.norm.weight)"),
        ("mtp.fc.bias", {"model_type": "mimo"}, "not one of Qwen3.5 or Qwen3-Next, but of mimo"),
        ("mtp.fc.bias", {"model_type": None}, "but of an unknown model"),
    ],
)
def test_an_mtp_head_in_an_unknown_format_is_refused_with_the_reason(
    tiny: TinyModels, tmp_path: Path, name: str, config: dict[str, Any], told: str
) -> None:
    found = tiny("qwen3_5_text")
    tensors = stored(found.folder) | {name: mx.zeros((2,))}
    folder = folder_with(found, tmp_path / "m", tensors, **config)
    assert told in refuses(folder, found.model, NONE)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mtp.fc.weight": None}, r"mtp.fc.weight is missing, and should be (64, 128)"),
        ({"mtp.fc.weight": (64, 64)}, r"mtp.fc.weight is (64, 64), and should be (64, 128)"),
        ({"mtp.fc.bias": (64,)}, r"mtp.fc.bias is (64,), and should be absent"),
    ],
)
def test_mtp_weights_that_do_not_fit_are_refused_with_the_tensor(
    tiny: TinyModels, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    found = tiny("qwen3_5_text")
    tensors = {n: v for n, v in stored(found.folder).items() if change.get(n, v) is not None}
    tensors |= {name: mx.zeros(shape) for name, shape in change.items() if shape is not None}
    folder = folder_with(found, tmp_path / "m", tensors)
    with pytest.raises(BadRequest) as error:
        load_head(folder, found.model.model)
    assert told in str(error.value)


def test_a_quantised_mtp_head_is_expanded_to_float32_on_a_cpu(tiny: TinyModels) -> None:
    found = tiny("qwen3_5_text", bits=4)
    drafting = start(found.folder, load_text(found.folder, LoadOptions(dtype="float32")), NONE)
    assert isinstance(drafting, HeadDrafting)
    values = [value for _, value in tree_flatten(drafting.head.module.parameters())]
    assert {value.dtype for value in values} == {mx.float32}


def test_a_model_without_the_layers_of_the_mtp_head_is_refused(tiny: TinyModels) -> None:
    """Neither the record's attributes nor those of its layers are what the head counts on."""
    folder = tiny("qwen3_5_text").folder
    assert refuses(folder, SimpleNamespace(), NONE) == (  # type: ignore[arg-type]
        "the model is not one of mlx-lm's or mlx-vlm's"
    )
    inner = SimpleNamespace(embed_tokens=None, norm=None, layers=[SimpleNamespace()])
    other = SimpleNamespace(model=SimpleNamespace(args=None, model=inner))
    assert "no layer of the model" in refuses(folder, other, NONE)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="no layer of the model"):
        load_head(folder, other.model)
