"""A drafter gets the outputs of the layers that it requests, for each of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from equipped import equipped
from mlx_provider import BadRequest, LoadedModel, LoadOptions, PrefillChunk, Prompt
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.speculation import UNASKED, source_of, speculation_of
from mlx_provider.families.checkpoint import read_json
from mlx_provider.families.layers import Outputs, watched
from mlx_provider.families.text import TextModel
from mlx_provider.records import Drafter, DraftRow, ShowsHidden, ShowsLayers
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import Alternating, new_engine, new_request, output_of, run
from mlx_provider.testing.oracle import Eager
from mlx_provider.testing.tiny import build
from references import alone

LAYERS = (2, 0)
CONTEXT = 32
TEXT = [20 + (i * i * 31 + i // 7) % 300 for i in range(120)]


class Noting:
    """A drafter that guesses a repetition of the text, and records the states of each row."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], mx.array]] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        for row in rows:
            assert row.hidden is not None
            assert row.hidden.shape[0] == row.fresh
            self.seen.append((list(row.tokens), row.hidden))
        return [[row.tokens[-1]] * row.wanted for row in rows]


def drafter(noting: Noting) -> Drafter:
    return Drafter(
        "noting",
        lambda folder, model, options: "",
        lambda folder, model, options: noting,
        hidden=True,
        layers=lambda drafting: LAYERS,
        context=CONTEXT,
    )


def states(model: LoadedModel, tokens: Sequence[int], shown: ShowsHidden | None = None) -> mx.array:
    """(tokens, layers * hidden) from one call of the model."""
    assert isinstance(model, ShowsLayers)
    chunk = PrefillChunk(Prompt(tokens), 0, len(tokens), model.make_cache())
    return (shown or model.showing(LAYERS)).prefill_hidden(chunk, len(tokens))[1]


def check(model: LoadedModel, noting: Noting) -> None:
    """Each state belongs to the token before the one that was drawn from it."""
    assert noting.seen
    assert isinstance(model, ShowsLayers)
    shown = model.showing(LAYERS)
    for tokens, hidden in noting.seen:
        expected = states(model, tokens[:-1], shown)[-hidden.shape[0] :]
        assert mx.max(mx.abs(hidden - expected)) < 1e-3


def serve(model: LoadedModel, requests: Sequence[Request], **more: Any) -> Noting:
    noting = Noting()
    speculation = speculation_of([source_of(drafter(noting), noting, model)], model, policy=Eager())
    engine = new_engine(model, speculation=speculation, scheduler=Alternating, **more)
    for request in requests:
        engine.submit(request)
        for _ in range(3):
            engine.step()
    run(engine)
    return noting


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text", "qwen3_vl", "qwen3_5_moe"])
def test_the_requested_layers_are_shown(tmp_path: Path, family: str) -> None:
    found, _ = PluginRegistry.discover({}).family_for(
        read_json(build(tmp_path, family) / "config.json")
    )
    model = equipped(found.load(tmp_path, LoadOptions()))
    tokens, places = mx.array([5, 6]), mx.array([0, 0], dtype=mx.int32)
    plain = model.prefill(PrefillChunk(Prompt(TEXT[:9]), 0, 9, model.make_cache()))
    shown = model.showing(LAYERS)
    logits, hidden = shown.prefill_hidden(PrefillChunk(Prompt(TEXT[:9]), 0, 9, cache := (
        model.make_cache())), 4)  # fmt: skip
    assert mx.allclose(logits, plain, atol=1e-4)
    assert mx.allclose(hidden, states(model, TEXT[:9])[-4:], atol=1e-4)
    logits, after = shown.decode_hidden(tokens[:1], cache, mx.array([9], dtype=mx.int32))
    assert mx.allclose(after, states(model, [*TEXT[:9], 5])[-1:], atol=1e-3)
    width = hidden.shape[-1] // len(LAYERS)
    other_order = model.showing(LAYERS[::-1])
    _, other = other_order.decode_hidden(tokens[:1], model.make_cache(), places[:1])
    _, same = shown.decode_hidden(tokens[:1], model.make_cache(), places[:1])
    assert mx.allclose(other[:, :width], same[:, width:], atol=1e-5)
    with pytest.raises(BadRequest, match="layers, and no layer 99"):
        model.showing([0, 99])


def test_an_output_is_the_input_of_the_next_layer(qwen3: TextModel) -> None:
    outputs, inputs = Outputs([0, 1]), []
    part = watched(qwen3.model.model, outputs)
    layer = part.layers[2]

    def spied(hidden: mx.array, *args: Any) -> Any:
        inputs.append(hidden)
        return layer(hidden, *args)

    part.layers[2] = spied
    part(mx.array([TEXT[:9]]))
    assert mx.array_equal(outputs.joined()[..., -inputs[0].shape[-1] :], inputs[0])
    assert qwen3.model.model.layers[2] is layer


@pytest.mark.parametrize("mixes", [False, True])
def test_rows_that_join_in_chunks_and_drafts_that_fail(qwen3: TextModel, mixes: bool) -> None:
    sampled = SamplingParams(temperature=0.9, seed=4)
    requests = [new_request(TEXT[: 7 + 31 * i], max_tokens=12) for i in range(3)]
    requests += [new_request(TEXT[5:70], max_tokens=12, params=sampled, n=2)]
    noting = serve(qwen3, requests, mixes=mixes)
    check(qwen3, noting)
    assert sum(request.drafted for request in requests) > 20
    for request in requests:
        assert output_of(request).tokens == output_of(alone(qwen3, request)).tokens
    if not mixes:  # the longest prompt has shown its maximum of states
        assert max(hidden.shape[0] for _, hidden in noting.seen) == CONTEXT


def test_a_cached_prefix_has_no_states(qwen3: TextModel) -> None:
    kept = PrefixCache(budget=lambda: 2**24)
    serve(qwen3, [new_request(TEXT[:60], max_tokens=4)], prefix_cache=kept)
    again = new_request(TEXT[:70], max_tokens=8)
    noting = serve(qwen3, [again], prefix_cache=kept)
    check(qwen3, noting)
    assert noting.seen[0][1].shape[0] <= 1 + 70 - again.cached + 8 < CONTEXT


def test_a_preempted_row_starts_again_with_the_states_of_its_reply(qwen3: TextModel) -> None:
    room, noting = [10_000], Noting()
    speculation = speculation_of([source_of(drafter(noting), noting, qwen3)], qwen3, policy=Eager())
    engine = new_engine(
        qwen3, speculation=speculation, reserve=4, available=lambda: room[0], max_chunk=64
    )
    requests = [new_request(TEXT[: 50 + i], max_tokens=16) for i in range(3)]
    for request in requests:
        engine.submit(request)
        engine.step()
    room[0] = 160
    while not engine.scheduler.queued:
        engine.step()
    room[0], before = 10_000, len(noting.seen)
    run(engine)
    check(qwen3, noting)
    assert any(hidden.shape[0] == CONTEXT for _, hidden in noting.seen[before:])
    for request in requests:
        assert output_of(request).tokens == output_of(alone(qwen3, request)).tokens


def test_states_of_many_prompts_are_bounded(qwen3: TextModel) -> None:
    """Without calls of a drafter, a limited number of rows keep the states of their prompts."""
    noting = Noting()
    speculation = speculation_of([source_of(drafter(noting), noting, qwen3)], qwen3)
    width = mx.zeros((UNASKED // 2, 4))
    rows = [new_request([1, 2]).rows[0] for _ in range(4)]
    for row in rows:
        row.tokens.append(3)
        speculation.begin(row, [width])
    counts = [sum(map(len, speculation._rows[row].shown)) for row in rows]
    assert counts == [UNASKED // 2, UNASKED // 2, 1, 1]


def test_a_model_without_such_layers_is_refused(qwen3: TextModel) -> None:
    class Plain:
        info = qwen3.info

    with pytest.raises(BadRequest, match="does not show the outputs of its layers"):
        source_of(drafter(Noting()), Noting(), Plain())  # type: ignore[arg-type]
