"""Rows that join, leave and are stored at any time, with lengths around the bound for merging."""

import copy
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlx_vlm.models import cache as in_place
from mlx_vlm.models.base import cache_position_offset
from mlx_vlm.models.qwen3_5 import language

from mlx_provider import LoadOptions
from mlx_provider.engine.execution import batch_layout
from mlx_provider.engine.execution.batch_layout import GROWN, NO_WIDTHS, Layout
from mlx_provider.engine.execution.decode_batch import run_pass
from mlx_provider.engine.prefix_cache.cache import PrefixCache
from mlx_provider.engine.prefix_cache.tree import CacheKey
from mlx_provider.engine.request import Row
from mlx_provider.engine.row_cache import arrays, profile
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import PrefillChunk
from mlx_provider.testing.driver import new_request
from mlx_provider.upstream.cache_classes import KVCache
from mlx_provider_qwen3_5 import load as load_qwen3_5
from noted_calls import note_calls
from tiny import build
from tolerances import logprob_tolerance

Tiny = Callable[..., TextModel]
Event = tuple[Any, ...]

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.sampled_from([2, 40, 250, 270, 530]), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("store"), st.integers(0, 9)),
        st.tuples(st.just("bound"), st.sampled_from([0.0, 1.9, 2.9, 6.9])),
        st.tuples(st.just("steps"), st.integers(1, 9)),
        st.tuples(st.just("drafts"), st.integers(0, 9), st.integers(2, 4), st.integers(1, 4)),
    ),
    min_size=4,
    max_size=14,
)


class Twins:
    """Rows of a layout, and the same rows alone."""

    def __init__(
        self, model: TextModel, layout: Layout, prefilled: dict[int, Any], *, exact: bool = False
    ) -> None:
        self.tolerance = 0.0 if exact else logprob_tolerance()
        self.model = model
        self.layout = layout
        self.prefilled = prefilled
        self.alone: dict[Row, list[Any]] = {}
        self.unit = 0
        """Bytes of a short row."""

    def play(self, events: Sequence[Event]) -> None:
        for kind, *more in [("join", 40, False), ("join", 2, False), *events, ("steps", 2)]:
            if kind == "join":
                self.join(*more)
            elif kind == "bound":
                self.layout.bound = int(more[0] * self.unit)
            elif kind == "steps":
                for _ in range(*more):
                    self.step()
            elif self.alone:
                row = list(self.alone)[more[0] % len(self.alone)]
                if kind == "drafts":
                    width, kept = more[1:]
                    self.step({row: width}, kept)
                    continue
                self.store(row)
                if kind == "leave":
                    self.layout.drop([row])
                    del self.alone[row]

    def join(self, length: int, roomy: bool) -> None:
        """`roomy`: its buffers have capacity for many more tokens."""
        request = new_request([20 + 7 * i % 300 for i in range(length)])
        if length not in self.prefilled:
            self.prefilled[length] = self.model.make_cache()
            self.model.prefill(PrefillChunk(request.prompt, 0, length, self.prefilled[length]))
            mx.eval(arrays(self.prefilled[length]))
        (row,) = request.rows
        cache, self.alone[row] = (copy.deepcopy(self.prefilled[length]) for _ in range(2))
        self.unit = self.unit or profile(cache).row_bytes(1)
        for layer in cache if roomy else []:
            if type(layer) is KVCache:
                room = [(0, 0), (0, 0), (0, 600), (0, 0)]
                layer.keys, layer.values = (mx.pad(a, room) for a in (layer.keys, layer.values))
        self.layout.add(row, cache)

    def step(self, drafting: Mapping[Row, int] = NO_WIDTHS, kept: int = 1) -> None:
        """Of the tokens of a row with several, the first `kept` stay."""
        widths = drafting if self.layout.one_pass else NO_WIDTHS
        passes = self.layout.passes(widths=widths)
        limit = GROWN * self.layout.bound
        assert all(len(g.rows) == 1 or g.nbytes() <= limit for g in self.layout.groups)
        for each in passes:
            places = [(row, 0) for row in each.rows]
            places += [(row, i) for row in each.drafting for i in range(widths[row])]
            tokens = mx.array([_token(row, i) for row, i in places], dtype=mx.int32)
            at = mx.array([row.length + i for row, i in places], dtype=mx.int32)
            found = self.model.decode(tokens, each.cache, at)
            for (row, i), logits in zip(places, found, strict=True):
                if i < kept:
                    own = self.decode([row], self.alone[row], {row: _token(row, i)}, i)
                    self.compare(logits, own[0])
        for row in self.alone:
            stay = min(kept, widths.get(row, 1))
            self.layout.keep_tokens(row, stay)
            row.tokens += [_token(row, i) for i in range(stay)]

    def store(self, row: Row) -> None:
        """The extracted cache of a row continues like its own; the layout does not change."""
        cache = self.layout.extract(row)
        own = copy.deepcopy(self.alone[row])
        if any(cache is group.cache for group in self.layout.groups):
            cache = copy.deepcopy(cache)
        for token in (25, 61):
            found, wanted = (self.decode([row], each, {row: token})[0] for each in (cache, own))
            self.compare(found, wanted)

    def decode(
        self, rows: list[Row], cache: list[Any], tokens: dict[Row, int], ahead: int = 0
    ) -> mx.array:
        fed = mx.array([tokens[row] for row in rows], dtype=mx.int32)
        at = mx.array([row.length + ahead for row in rows], dtype=mx.int32)
        return self.model.decode(fed, cache, at)

    def compare(self, found: mx.array, wanted: mx.array) -> None:
        largest = mx.max(mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)))
        assert largest <= self.tolerance


def _token(row: Row, ahead: int) -> int:
    return 20 + 13 * (row.length + ahead) % 300


EXAMPLES = [1, pytest.param(20, marks=pytest.mark.sweep)]


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("layout", ["grouped", "merged", "padded"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5_text"])
def test_any_mix_of_lengths_decodes_as_alone(
    tiny: Tiny, family: str, layout: str, examples: int, monkeypatch
) -> None:
    monkeypatch.setattr(batch_layout, "REUNITED", 2)
    model = tiny(family)
    prefilled: dict[int, Any] = {}

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(EVENTS)
    @example([("join", 530, False), ("steps", 2), ("drafts", 2, 3, 2), ("leave", 0)])
    def check(events: list[Event]) -> None:
        Twins(model, Layout(layout), prefilled).play(events)

    check()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize(("family", "bits"), [("llama", 16), ("qwen3", 4)])
def test_formats_that_users_run_decode_bitwise_as_alone(
    tmp_path: Path, family: str, bits: int, examples: int
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model = load_text(build(tmp_path / "m", family, dtype="bfloat16", **sizes), LoadOptions())
    if bits == 4:
        nn.quantize(model.model, group_size=32, bits=4)
    prefilled: dict[int, Any] = {}

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(EVENTS)
    def check(events: list[Event]) -> None:
        Twins(model, Layout("grouped"), prefilled, exact=True).play(events)

    check()


def test_caches_that_change_offsets_in_place_decode_in_groups(tiny: Tiny) -> None:
    """mlx-vlm's own batch caches change their array of offsets (models/cache.py 0.7.10)."""
    model = tiny("qwen3", num_hidden_layers=1)
    twins = Twins(model, Layout("grouped"), {})
    for length in (40, 30, 700, 600):
        other = [in_place.KVCache() for _ in model.make_cache()]
        prompt = new_request([20 + 7 * i % 300 for i in range(length)]).prompt
        model.prefill(PrefillChunk(prompt, 0, length, other))
        twins.prefilled[length] = other
        twins.join(length, roomy=False)
    for _ in range(4):
        twins.step()
    assert len(twins.layout.groups) == 2


LONG = 2000
DRAFTED = ((4, 1), (4, 4), (3, 2), (2, 1), (4, 3))
"""(tokens of a row in a pass, those that stay)"""
FAMILIES = ("qwen3", "gemma3_text", "qwen3_5_text")


def long_row(model: TextModel) -> tuple[Row, list[Any]]:
    """A row whose attention layers hold many arbitrary tokens."""
    request = new_request([30] * (LONG + 5))
    cache = model.make_cache()
    model.prefill(PrefillChunk(request.prompt, 0, 5, cache))
    for layer in cache:
        if hasattr(layer, "update_and_fetch"):
            _, heads, _, dim = layer.keys.shape
            layer.update_and_fetch(*(mx.random.normal((1, heads, LONG, dim)) for _ in range(2)))
    mx.eval(arrays(cache))
    return request.rows[0], cache


def step(model: TextModel, layout: Layout) -> None:
    for each in layout.passes():
        positions = [row.length for row in each.rows]
        mx.eval(run_pass(model, each, mx.array([30] * len(each.rows)), positions).logits)
        for row in each.rows:
            row.tokens.append(30)


def allocated(work: Callable[[], None]) -> int:
    """Peak bytes beyond those at the start."""
    gc.collect()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return max(0, mx.get_peak_memory() - held)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 3])
def test_an_insertion_copies_only_the_new_tokens(tiny: Tiny, family: str, count: int) -> None:
    model, layout = tiny(family), Layout("grouped")
    rows = [long_row(model) for _ in range(count)]
    first, cache = rows[0]
    key, store = CacheKey("model"), PrefixCache(budget=lambda: 2**40)
    ids = list(range(LONG + 9))
    store.insert(key, ids[: LONG + 5], cache, {})
    for row, own in rows:
        layout.add(row, own)
    del rows, cache, own
    for _ in range(4):
        step(model, layout)
    assert len(layout.groups) == 1
    row_bytes = layout.groups[0].nbytes() // count
    stored = store.nbytes
    assert allocated(lambda: store.insert(key, ids, layout.extract(first), {})) < row_bytes / 8
    assert 0 < store.nbytes - stored < row_bytes / 8
    assert allocated(lambda: step(model, layout)) < row_bytes / 2  # still in place


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_above_the_bound_join_and_leave_without_copies(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    rows = [long_row(model) for _ in range(4)]
    row_bytes = profile(rows[0][1]).row_bytes(LONG)
    monkeypatch.setattr(batch_layout, "MERGED_BYTES", 2 * row_bytes - 1)
    layout = Layout("grouped")
    for row, cache in rows[:3]:
        layout.add(row, cache)
    step(model, layout)
    (late, cache), leaver = rows[3], rows[1][0]
    del rows

    def traffic() -> None:
        layout.add(late, cache)
        step(model, layout)
        layout.drop([leaver])
        step(model, layout)

    assert allocated(traffic) < row_bytes / 2
    assert [len(each.rows) for each in layout.passes()] == [3]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_a_model_reads_the_length_without_waiting(
    tiny: Tiny, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(tiny(family), Layout("grouped"), {})
    for length in (40, 30, 270):
        twins.join(length, roomy=False)
    twins.step()
    (cache,) = [each.cache for each in twins.layout.passes()]
    asked: list[mx.array] = []
    monkeypatch.setattr(mx.array, "item", lambda array: asked.append(array) or 0)
    assert {cache_position_offset(layer) for layer in cache} == {271}
    assert not asked


def test_a_group_that_outgrows_the_bound_is_halved(tiny: Tiny) -> None:
    model = tiny("qwen3")
    twins = Twins(model, Layout("grouped"), {})
    for length in (40, 250, 60, 200):
        twins.join(length, roomy=False)
    groups = twins.layout
    assert [len(g.rows) for g in groups.groups] == [4]
    groups.bound = 2 * twins.unit
    twins.step()
    assert [len(g.rows) for g in groups.groups] == [4]
    groups.bound = twins.unit
    for _ in range(5):
        twins.step()
    parted = [[row.length for row in g.rows] for g in groups.groups]
    assert parted == [[46, 66], [206, 256]]  # the shorter rows and the longer ones
    for _ in range(2):
        twins.step()
    assert [len(g.rows) for g in groups.groups] == [2, 1, 1]


def test_a_recurrent_state_is_stored_once(tiny: Tiny) -> None:
    model, layout = tiny("qwen3_5_text"), Layout("grouped")
    for _ in range(3):
        layout.add(*long_row(model))
    layout.bound = 0
    step(model, layout)
    states = [layer for g in layout.groups for layer in g.cache if hasattr(layer, "cache")]
    assert states
    assert not arrays(states)
    layout.drop([layout.groups[0].rows[0]])
    assert arrays([layer for layer in layout.groups[0].cache if hasattr(layer, "cache")])


def test_rows_without_recent_drafts_share_a_group_again(tiny: Tiny, monkeypatch) -> None:
    monkeypatch.setattr(batch_layout, "REUNITED", 3)
    twins = Twins(tiny("qwen3"), Layout("grouped"), {})
    for _ in range(3):
        twins.join(40, roomy=False)
    first, second, _ = twins.alone
    twins.step({first: 3, second: 2}, kept=2)
    assert sorted(len(group.rows) for group in twins.layout.groups) == [1, 1, 1]
    twins.step({second: 2}, kept=1)
    for _ in range(2):
        twins.step()
    assert sorted(len(group.rows) for group in twins.layout.groups) == [1, 2]
    twins.step()
    assert [len(group.rows) for group in twins.layout.groups] == [3]


RULES = {
    "qwen3_5_text": ("mlx_lm.models.qwen3_5", "gated_delta_update"),
    "qwen3_next": ("mlx_lm.models.qwen3_next", "gated_delta_update"),
    "nemotron_h": ("mlx_lm.models.nemotron_h", "ssm_update"),
}


@pytest.mark.parametrize("family", RULES)
def test_the_rule_of_a_layer_of_mlx_lm_runs_once_for_each_draft(
    family: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call has one row and one token, not one row for each draft."""
    model = tiny(family)
    module, name = sys.modules[RULES[family][0]], RULES[family][1]
    asked = note_calls(monkeypatch, module, name, lambda first, *_, **more: first.shape[:2])
    noted = getattr(module, name)
    twins = Twins(model, Layout("grouped"), {})
    drafts = [("drafts", row, width, kept) for row in (0, 1) for width, kept in DRAFTED]
    twins.play([("join", 300, False), *drafts, ("leave", 0), *drafts])
    assert asked.count((1, 1)) > 10
    assert not [shape for shape in asked if 2 < shape[1] < 9]  # a prompt has 2 tokens
    assert getattr(module, name) is noted


def test_a_recurrent_layer_that_records_its_states_runs_once_over_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each possible number of accepted drafts."""
    model = load_qwen3_5(build(tmp_path / "m", "qwen3_5"), LoadOptions())
    asked = note_calls(
        monkeypatch, language, "gated_delta_update", lambda q, *_, **more: q.shape[:2]
    )
    twins = Twins(model, Layout("grouped"), {})
    drafts = [("drafts", row, width, kept) for row in (0, 1) for width, kept in DRAFTED]
    twins.play([("join", 300, False), *drafts, ("leave", 0), *drafts])
    assert {shape for shape in asked if 1 < shape[1] < 9} == {(1, 2), (1, 3), (1, 4)}
