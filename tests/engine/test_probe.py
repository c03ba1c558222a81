"""The probe distinguishes kernel noise from errors of a layout; deep models amplify noise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from kernel_noise import (
    NoisyDevice,
    Probed,
    finds_chunk_bug,
    finds_layout_bug,
    keeps_the_best,
    noisy_device,
)
from layout_bugs import CHUNK_BUGS, LAYOUT_BUGS, OTHER_BUGS, STATE_BUGS, no_mask
from mlx_provider import LoadOptions
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.serving import probe, solo_rows
from mlx_provider.upstream import recurrent
from tiny import build
from wrapped_model import WrappedModel

Patch = pytest.MonkeyPatch
Deep = Callable[..., TextModel]
FINDS = ((LAYOUT_BUGS, finds_layout_bug), (CHUNK_BUGS, finds_chunk_bug))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NoisyDevice]:
    with noisy_device(tmp_path_factory.mktemp("deep")) as device:
        yield device


@pytest.fixture
def deep(noisy: NoisyDevice) -> Deep:
    return noisy.model


@pytest.fixture
def probed(noisy: NoisyDevice) -> Probed:
    return noisy.probe


# -- noise


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_noise_of_kernels_leaves_the_best_layout(deep: Deep, probed: Probed, seed: int) -> None:
    found = probed(deep(seed, layers=16))
    assert keeps_the_best(found), found
    assert 0.1 < found.noise_floor < 2


def test_padding_may_round_where_the_width_of_a_batch_does_not(deep: Deep, probed: Probed) -> None:
    found = probed(deep(1, layers=12), 0.0, padded=1e-6)
    assert keeps_the_best(found), found
    assert found.noise_floor > 0.02


@pytest.mark.sweep
@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("seed", range(10))
def test_any_noise_leaves_the_best_layout(
    deep: Deep, probed: Probed, seed: int, share: float
) -> None:
    found = probed(deep(seed), share, padded=1e-6)
    assert keeps_the_best(found), found


# -- errors of a layout


@pytest.mark.parametrize("bug", LAYOUT_BUGS | CHUNK_BUGS)
def test_an_error_of_the_layout_or_of_mixed_chunks_is_found(
    deep: Deep, probed: Probed, monkeypatch: Patch, bug: str
) -> None:
    """With one of two models; the sweep tests all errors with many, deeper ones."""
    bugs, finds = next(each for each in FINDS if bug in each[0])
    bugs[bug](monkeypatch)
    assert finds(probed, deep(list(bugs).index(bug) % 2, layers=8))


@pytest.mark.parametrize("bug", OTHER_BUGS)
def test_errors_of_windows_and_states_are_found(
    deep: Deep, probed: Probed, monkeypatch: Patch, bug: str
) -> None:
    family, break_it = OTHER_BUGS[bug]
    model = deep(0, family, layers=4)
    assert probed(model).layout == "grouped"
    break_it(monkeypatch)
    assert finds_layout_bug(probed, model)


@pytest.mark.parametrize("bug", STATE_BUGS)
def test_errors_of_a_chunks_states_are_found(
    deep: Deep, probed: Probed, monkeypatch: Patch, bug: str
) -> None:
    model = deep(0, "qwen3_5_text", layers=4)
    assert probed(model).mixes
    STATE_BUGS[bug](monkeypatch)
    found = probed(model)
    assert (found.layout, found.mixes) == ("grouped", False)


@pytest.mark.sweep
@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-4, 1e-3])
@pytest.mark.parametrize("seed", range(10))
def test_every_error_is_found_at_any_noise(
    deep: Deep, probed: Probed, seed: int, share: float
) -> None:
    missed = []
    for bugs, finds in FINDS:
        for name, bug in bugs.items():
            with pytest.MonkeyPatch.context() as patch:
                bug(patch)
                if not finds(partial(probed, share=share), deep(seed)):
                    missed.append(name)
    assert not missed


# -- what noise is not


@dataclass
class Changed(WrappedModel):
    """A model whose logits for a batch differ, in any layout."""

    change: Callable[[mx.array], mx.array]

    def decode(self, tokens: mx.array, *args: Any) -> mx.array:
        logits = self.inner.decode(tokens, *args)
        return self.change(logits) if tokens.size > 1 else logits


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: mx.roll(logits, 1, axis=1),
        lambda logits: 2 * logits,
        lambda logits: logits * mx.nan,
        lambda logits: logits + mx.where(mx.arange(logits.shape[1]) % 9 == 0, mx.inf, 0.0),
    ],
    ids=["other tokens", "other temperature", "no numbers", "infinite"],
)
def test_equal_rows_with_wrong_logits_are_no_noise(
    qwen3: TextModel, change: Callable[[mx.array], mx.array]
) -> None:
    model: Any = Changed(qwen3, change)
    found = probe.probe(model, qwen3.make_cache, qwen3.kv_layouts)
    assert (found.layout, found.mixes, len(found.notes)) == ("solo", False, 2)


def test_a_cache_that_cannot_hold_equal_rows_is_judged_too(
    qwen3: TextModel, monkeypatch: Patch
) -> None:
    def refuse(*args: Any) -> Any:
        raise TypeError("no batch")

    monkeypatch.setattr(solo_rows, "copies", refuse)
    found = probe.probe(qwen3, qwen3.make_cache, ("grouped", "merged", "solo"))
    assert (found.layout, found.mixes) == ("grouped", False)
    no_mask(monkeypatch)
    assert probe.probe(qwen3, qwen3.make_cache, ("grouped", "solo")).layout == "solo"


def test_a_layer_whose_states_are_not_recorded_gets_no_drafts_and_no_new_probe(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(recurrent, "RULES", {})
    model = load_text(build(tmp_path / "m", "nemotron_h"), LoadOptions())
    found = probe.probe(model, model.make_cache, ["grouped"])
    assert (found.layout, found.mixes, found.drafts, found.conclusive) == (
        "grouped", True, False, True
    ), found.notes  # fmt: skip
    assert any("keeps no state after each token" in note for note in found.notes)


def test_rows_that_decode_alone_need_no_proof(qwen3: TextModel) -> None:
    class Silent(Changed):
        def decode(self, tokens: mx.array, *args: Any) -> mx.array:
            raise AssertionError("nothing is decoded")

    model: Any = Silent(qwen3, lambda logits: logits)
    found = probe.probe(model, qwen3.make_cache, ("solo",))
    assert (found.layout, found.notes, found.noise_floor) == ("solo", (), 0.0)
    assert found.memory.row_bytes(256) == 256 * found.memory.token_bytes


@pytest.mark.parametrize("family", ["qwen3", "nemotron_h"])
def test_all_memory_of_the_probe_is_reserved(
    family: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """For a model whose logits need most of the memory of a pass, as for real models."""
    model = load_text(build(tmp_path / "m", family, vocab_size=1500), LoadOptions())
    asked: list[int] = []
    peaks: list[int] = []
    reset = mx.reset_peak_memory
    monkeypatch.setattr(
        mx, "reset_peak_memory", lambda: (peaks.append(mx.get_peak_memory()), reset())
    )

    def probed(free: int) -> probe.Probe:
        def reserve(nbytes: int) -> bool:
            asked.append(nbytes)
            return nbytes <= free

        return probe.probe(model, model.make_cache, model.kv_layouts, reserve=reserve)

    before = mx.get_active_memory()
    reset()
    found = probed(2**40)
    assert found.layout == "grouped"
    assert max(*peaks, mx.get_peak_memory()) - before <= asked[-1]
    less = probed(asked[-1] // 2)
    assert (less.layout, less.notes, less.conclusive) == ("solo", (probe.ALONE,), False)
    assert less.memory == found.memory
