"""Rows of the engine: together as alone, from the prefix cache as computed, in every layout."""

import json
from pathlib import Path

import pytest
from mlx_provider_lfm3.convert import convert

from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import Eager, alone, new_engine, new_request, output_of, run
from schedules import Oracle

REFERENCE = Path(__file__).parent / "reference"
LENGTHS = (3, 17, 40, 71)
"""Some shorter and some longer than the window, 12, and the convolutions, 7."""
CLOSE = 1e-4


@pytest.fixture(scope="module")
def plugins() -> PluginRegistry:
    return PluginRegistry.discover({})


def loaded(plugins: PluginRegistry, folder: Path, dtype: str | None) -> LoadedModel:
    config = json.loads((folder / "config.json").read_text())
    family, plugin = plugins.family_for(config)
    assert (family.name, plugin.error) == ("lfm3", None)
    return family.load(folder, LoadOptions(dtype=dtype))


@pytest.fixture(scope="module")
def model(plugins: PluginRegistry) -> LoadedModel:
    return loaded(plugins, REFERENCE, "float32")


@pytest.mark.parametrize("layout", ["grouped", "merged", "solo"])
def test_rows_of_any_length_answer_as_alone(model: LoadedModel, layout: str) -> None:
    """Prompts come in chunks of 16, some of them in the pass of rows that decode."""
    requests = [new_request(range(5, 5 + size), max_tokens=20, logprobs=1) for size in LENGTHS]
    engine = new_engine(model, layout=layout, mixes=layout == "grouped", max_chunk=16)
    for request in requests:
        engine.submit(request)
        engine.step()
    run(engine)
    for request in requests:
        got, wanted = output_of(request), output_of(alone(model, request))
        assert got.tokens == wanted.tokens
        pairs = zip(got.logprobs, wanted.logprobs, strict=True)
        assert all(abs(a.logprob - b.logprob) < CLOSE for a, b in pairs)


def test_rejected_drafts_do_not_change_convolution_states(model: LoadedModel) -> None:
    """Of what a convolution keeps, it is the tokens that stay which count: `lengths`."""
    prompts = [list(range(5, 5 + size)) for size in LENGTHS]
    plain = [output_of(alone(model, new_request(each, max_tokens=20))).tokens for each in prompts]
    oracle = Oracle(share=0.6, vocab=model.info.vocab_size)
    for prompt, tokens in zip(prompts, plain, strict=True):
        oracle.learn([*prompt, *tokens])
    drafts = Speculation(
        Source(oracle), vocab=model.info.vocab_size, policy=Eager(), clock=lambda: 0.0
    )
    engine = new_engine(model, mixes=True, speculation=drafts, clock=lambda: 0.0)
    requests = [new_request(prompt, max_tokens=20) for prompt in prompts]
    run(engine, *requests)
    assert [output_of(request).tokens for request in requests] == plain
    assert all(0 < request.accepted < request.drafted for request in requests)


def test_a_cached_prefix_is_not_computed_again(model: LoadedModel) -> None:
    engine = new_engine(model, prefix_cache=PrefixCache(budget=lambda: 2**22), max_chunk=16)
    messages = [{"role": "user", "content": "Say the alphabet twice, please. " * 8}]
    first = model.prepare(messages, tools=[], media=[], variables={})
    more = [{"role": "assistant", "content": "abc"}, {"role": "user", "content": "And again."}]
    second = model.prepare([*messages, *more], tools=[], media=[], variables={})
    for prompt, least in ((first, 0), (first, 250), (second, 250)):
        request = new_request(prompt.tokens, max_tokens=12)
        request.prompt = prompt
        run(engine, request)
        assert request.cached_tokens >= least
        assert output_of(request).tokens == output_of(alone(model, request)).tokens


def test_rows_of_a_four_bit_model_decode_together(plugins: PluginRegistry, tmp_path: Path) -> None:
    folder = convert(REFERENCE, tmp_path / "new", bits=4, group=32)
    small = loaded(plugins, folder, None)
    requests = [new_request(range(5, 5 + size), max_tokens=6) for size in LENGTHS]
    engine = new_engine(small, mixes=True)
    run(engine, *requests)
    assert [len(output_of(request).tokens) for request in requests] == [6] * len(LENGTHS)
