"""In the formats that users run, what a prompt gives does not depend on where its passes ended."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equipped import in_four_bits, load_by_family
from mlx_provider import LoadedModel, PrefillChunk, Prompt
from mlx_provider.engine.scheduling.chunking import GRID, chunk_sizes
from tiny import build

FAMILIES = ("nemotron_h", "rwkv7", "qwen3_5_text", "qwen3_5", "qwen3", "gemma3_text")
LENGTH = 300
TOKENS = [(7 * i + 3) % 300 + 20 for i in range(LENGTH)]
Load = Callable[[str, bool], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A tiny model by family, in bfloat16 or in 4 bits."""

    def made(family: str, quantised: bool) -> LoadedModel:
        folder: Path = build(tmp_path_factory.mktemp("grid") / family, family, dtype="bfloat16")
        model = load_by_family(folder)
        return in_four_bits(model) if quantised else model

    return made


def after(model: LoadedModel, stops: list[int]) -> mx.array:
    """Logits after the prompt and after one more token, prefilled up to each of the stops."""
    cache, start, logits = model.make_cache(), 0, mx.zeros(1)
    for stop in stops:
        logits = model.prefill(PrefillChunk(Prompt(TOKENS), start, stop, cache))
        mx.eval(logits)
        start = stop
    more = model.decode(mx.array([7]), cache, mx.array([LENGTH]))
    return mx.concatenate([logits.reshape(-1), more.reshape(-1)])


@pytest.mark.parametrize("examples", [1, pytest.param(12, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("family", "quantised"),
    [
        pytest.param(family, quantised, marks=() if quantised == i % 2 else pytest.mark.sweep)
        for i, family in enumerate(FAMILIES)
        for quantised in (False, True)
    ],
)
def test_prefill_passes_that_end_on_the_grid_give_equal_bits(
    load: Load, family: str, quantised: bool, examples: int
) -> None:
    model = load(family, quantised)
    whole = after(model, [LENGTH])

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(choices=st.lists(st.integers(0, 4), min_size=10, max_size=10))
    def check(choices: list[int]) -> None:
        stops, at = [], 0
        for choice in choices:
            if at < LENGTH:
                sizes = chunk_sizes(at, LENGTH, LENGTH, LENGTH, GRID)
                at += sizes[choice % len(sizes)]
                stops.append(at)
        assert mx.array_equal(after(model, stops), whole)

    check()
