"""The probe tells kernel noise from errors of a layout, on deep models that carry noise far."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, BatchRotatingKVCache, RotatingKVCache

from mlx_provider import LoadOptions
from mlx_provider.engine.execution import batch_layout, grouped_kv, probe, row_groups, solo_rows
from mlx_provider.engine.execution.grouped_kv import GroupedKV
from mlx_provider.engine.execution.piggyback import ChunkKV
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.testing.tiny_models import build
from mlx_provider.upstream.recurrent import StateRun

LAYERS = 36
Patch = pytest.MonkeyPatch


# -- kernels that round by the width of the batch


@dataclass
class Kernels:
    """Products in float32, rounded once; of a batch, with the noise of another order of sums."""

    noise: float = 0.0
    """In what is added to hidden states, as a share of its root mean square."""
    padded: float = 0.0
    """The same of masked attention alone: padding reorders sums where the batch does not."""
    calls: int = 0
    noisy: set[int] = field(default_factory=set)
    weights: dict[int, tuple[Any, mx.array]] = field(default_factory=dict)

    def linear(self, layer: Any, x: mx.array) -> mx.array:
        y = x.astype(mx.float32) @ self.expanded(layer)
        if self.noise and id(layer) in self.noisy and x.shape[0] * x.shape[1] > 1:
            scale = self.noise * mx.sqrt(mx.mean(mx.square(y), axis=-1, keepdims=True))
            y = y + scale * self.drawn(y)
        return y.astype(x.dtype)

    def expanded(self, layer: Any) -> mx.array:
        """Transposed, in float32."""
        if id(layer) not in self.weights:
            weight = layer["weight"]
            if isinstance(layer, nn.QuantizedLinear):
                scales, biases = (layer[n].astype(mx.float32) for n in ("scales", "biases"))
                weight = mx.dequantize(weight, scales, biases, layer.group_size, layer.bits)
            weight = weight.astype(mx.float32).T
            mx.eval(weight)
            self.weights[id(layer)] = layer, weight
        return self.weights[id(layer)][1]

    def drawn(self, array: mx.array) -> mx.array:
        self.calls += 1
        return mx.random.normal(array.shape, key=mx.random.key(self.calls))


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    own = Kernels()
    exact = mx.fast.scaled_dot_product_attention

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        found = exact(*(each.astype(mx.float32) for each in (queries, keys, values)), **more)
        if own.padded and isinstance(more.get("mask"), mx.array):
            found = found * (1 + own.padded * own.drawn(found))
        return found.astype(queries.dtype)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (nn.Linear, nn.QuantizedLinear):
            patch.setattr(kind, "__call__", lambda layer, x: own.linear(layer, x))
        patch.setattr(mx.fast, "scaled_dot_product_attention", attention)
        # Two groups of two rows each, as the lengths make that a device is probed with.
        patch.setattr(row_groups, "SHORT", 16)
        patch.setattr(probe, "LENGTHS", (5, 11, 33, 40))
        yield own


Deep = Callable[..., TextModel]


@pytest.fixture(scope="module")
def deep(kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Deep:
    """A random bfloat16 model by seed; the odd ones are quantised to 4 bit."""
    known: dict[Any, TextModel] = {}

    def get(seed: int, family: str = "qwen3", layers: int = LAYERS) -> TextModel:
        key = seed, family, layers
        if key not in known:
            folder = tmp_path_factory.mktemp("deep") / family
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
            build(folder, family, seed=seed, **sizes)
            model = load_text(folder, LoadOptions(dtype="bfloat16"))
            if seed % 2:
                nn.quantize(model.model, group_size=32, bits=4)
                mx.eval(model.model.parameters())
            for name, layer in model.model.named_modules():
                if name.endswith(("o_proj", "out_proj", "down_proj")):
                    kernels.noisy.add(id(layer))
            known[key] = model
        return known[key]

    return get


@pytest.fixture(scope="module")
def probed(kernels: Kernels) -> Iterator[Callable[..., probe.Probe]]:
    """`probed(model, noise)`: what each model's rows give alone is computed once."""
    known: dict[Any, Any] = {}

    def remembered(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, make_cache: Any, tokens: list[int], *more: int) -> Any:
            key = original, id(model), kernels.noise, tuple(tokens)
            if key not in known:
                known[key] = original(model, make_cache, tokens, *more)
            return known[key]

        return call

    def run(
        model: TextModel, share: float = 1e-3, padded: float = 0.0, layouts: Sequence[str] = ()
    ) -> probe.Probe:
        kernels.noise, kernels.padded, kernels.calls = share, padded, 0
        return probe.probe(model, model.make_cache, layouts or model.kv_layouts)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("decoding", "chunked"):
            patch.setattr(solo_rows, name, remembered(getattr(solo_rows, name)))
        yield run


Probed = Callable[..., probe.Probe]


# -- noise


@pytest.mark.parametrize("seed", range(6))
def test_noise_of_kernels_leaves_the_best_layout(deep: Deep, probed: Probed, seed: int) -> None:
    found = probed(deep(seed))
    assert (found.layout, found.mixes, found.notes) == ("grouped", True, ())
    assert 0.1 < found.noise_floor < 2


def test_padding_may_round_where_the_width_of_a_batch_does_not(deep: Deep, probed: Probed) -> None:
    found = probed(deep(1, layers=12), 0.0, padded=1e-6)
    assert (found.layout, found.mixes, found.notes) == ("grouped", True, ())
    assert found.noise_floor > 0.02


@pytest.mark.sweep
@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("seed", range(10))
def test_any_noise_leaves_the_best_layout(
    deep: Deep, probed: Probed, seed: int, share: float
) -> None:
    found = probed(deep(seed), share, padded=1e-6)
    assert (found.layout, found.mixes, found.notes) == ("grouped", True, ())


# -- errors of a layout


def no_mask(patch: Patch) -> None:
    """Padding is attended to."""
    make = BatchKVCache.make_mask

    def masked(cache: Any, count: int, **more: Any) -> Any:
        return None if count == 1 else make(cache, count, **more)

    patch.setattr(BatchKVCache, "make_mask", masked)


def merging(change: Callable[[Any], None]) -> Callable[[Patch], None]:
    """What merged rows are changed to, layer by layer."""

    def bug(patch: Patch) -> None:
        merge = row_groups.merged

        def merged(rows: Sequence[Any]) -> list[Any]:
            batch = merge(rows)
            for layer in batch:
                change(layer)
            return batch

        patch.setattr(row_groups, "merged", merged)

    return bug


def offset_of_all(cache: Any) -> None:
    cache.offset = cache.offset + 1


def offset_of_one(cache: Any) -> None:
    cache.offset = cache.offset + mx.array([1] + [0] * (cache.offset.size - 1))


def offset_is_the_longest(cache: Any) -> None:
    cache.offset = cache.offset + cache.left_padding


def first_token_hidden(cache: Any) -> None:
    cache.left_padding = cache.left_padding + (cache.left_padding > 0)


def one_token_of_padding_seen(cache: Any) -> None:
    cache.left_padding = cache.left_padding - (cache.left_padding > 0)


def keys_shifted(cache: Any) -> None:
    cache.keys[:1] = mx.roll(cache.keys[:1], 1, axis=2)


def rows_swapped(cache: Any) -> None:
    cache.keys, cache.values = cache.keys[::-1], cache.values[::-1]


def values_swapped(cache: Any) -> None:
    cache.values = cache.values[::-1]


def last_token_lost(cache: Any) -> None:
    cache.keys[:, :, cache._idx - 1 : cache._idx] = 0


def rows_share_keys(cache: Any) -> None:
    cache.keys = mx.broadcast_to(cache.keys[-1:], cache.keys.shape)


def leaves_without_its_last_token(patch: Patch) -> None:
    extract = row_groups.rows_of

    def extracted(batch: Sequence[Any], indices: Iterable[int]) -> list[Any]:
        rows = extract(batch, indices)
        for layer in itertools.chain(*rows):
            layer.offset -= 1
        return rows

    patch.setattr(row_groups, "rows_of", extracted)


def another_row_leaves(patch: Patch) -> None:
    extract = row_groups.rows_of

    def extracted(batch: Sequence[Any], indices: Iterable[int]) -> list[Any]:
        size = batch[0].left_padding.size
        return extract(batch, [(index + 1) % size for index in indices])

    patch.setattr(row_groups, "rows_of", extracted)


def comes_back_without_its_last_token(patch: Patch) -> None:
    add, known = row_groups.Groups.add, set()

    def added(groups: row_groups.Groups, row: Any, cache: list[Any], **more: Any) -> None:
        for layer in cache if row in known else ():
            layer.offset -= 1
        known.add(row)
        add(groups, row, cache, **more)

    patch.setattr(row_groups.Groups, "add", added)


def groups_share_offsets(patch: Patch) -> None:
    def offset(cache: GroupedKV) -> mx.array:
        first = mx.array(cache.parts[0].offset).reshape(-1)[:1]
        return mx.broadcast_to(first, (sum(cache.sizes),))

    patch.setattr(GroupedKV, "offset", property(offset))


def groups_share_masks(patch: Patch) -> None:
    make = GroupedKV.make_mask

    def masks(cache: GroupedKV, *args: Any, **kwargs: Any) -> list[Any]:
        made = make(cache, *args, **kwargs)
        return [None for _ in made[:-1]] + made[-1:]

    patch.setattr(GroupedKV, "make_mask", masks)


LAYOUT_BUGS = {
    "padding seen": no_mask,
    "offset of all rows": merging(offset_of_all),
    "offset of one row": merging(offset_of_one),
    "offset of the longest row": merging(offset_is_the_longest),
    "first token hidden": merging(first_token_hidden),
    "one token of padding seen": merging(one_token_of_padding_seen),
    "keys of one row shifted": merging(keys_shifted),
    "rows swapped": merging(rows_swapped),
    "values swapped": merging(values_swapped),
    "last token lost": merging(last_token_lost),
    "rows share keys": merging(rows_share_keys),
    "leaves without its last token": leaves_without_its_last_token,
    "another row leaves": another_row_leaves,
    "comes back without its last token": comes_back_without_its_last_token,
    "groups share offsets": groups_share_offsets,
    "a group without its mask": groups_share_masks,
}


def chunk_method(name: str, changed: Callable[..., Any]) -> Callable[[Patch], None]:
    """`changed` stands for a method of `ChunkKV`, which is its first argument."""

    def bug(patch: Patch) -> None:
        original = getattr(ChunkKV, name)
        patch.setattr(ChunkKV, name, lambda *args, **more: changed(original, *args, **more))

    return bug


def chunk_ends_early(update: Any, cache: ChunkKV, keys: mx.array, values: mx.array) -> Any:
    fetched = update(cache, keys, values)
    cache.inner.offset -= 1
    return fetched


def chunk_turned(update: Any, cache: ChunkKV, keys: mx.array, values: mx.array) -> Any:
    return update(cache, keys[::-1], values[::-1])


def chunk_at(position: Callable[[int, int], list[int]]) -> Callable[[Patch], None]:
    """position: (tokens before the chunk, tokens of it) -> what they are taken to stand at."""

    def bug(patch: Patch) -> None:
        def moved(cache: ChunkKV) -> mx.array:
            return mx.array(position(cache.inner.offset, cache.tokens))

        patch.setattr(ChunkKV, "offset", property(moved))

    return bug


def sees(more: int | None) -> Callable[[Patch], None]:
    """Each token of a chunk sees so many too many; `None`: all of the chunk."""

    def mask(make: Any, cache: ChunkKV, *args: Any, **kwargs: Any) -> Any:
        if more is None:
            return None
        seen = cache.inner.offset + 1 + more + mx.arange(cache.tokens)
        return mx.arange(cache.inner.offset + cache.tokens) < seen[:, None]

    return chunk_method("make_mask", mask)


CHUNK_BUGS = {
    "a chunk's last token missing": chunk_method("update_and_fetch", chunk_ends_early),
    "a chunk's tokens turned": chunk_method("update_and_fetch", chunk_turned),
    "a chunk a position too late": chunk_at(lambda at, count: list(range(at + 1, at + count + 1))),
    "a chunk at one position": chunk_at(lambda at, count: [at] * count),
    "a chunk sees its end": sees(None),
    "a chunk sees a token ahead": sees(1),
    "a chunk does not see itself": sees(-1),
}


def each_with_a_seed(bugs: Iterable[str]) -> list[tuple[str, int]]:
    """The models take turns; the sweep has all errors in all of them."""
    return list(zip(bugs, itertools.cycle(range(6)), strict=False))


def finds_layout_bug(probed: Probed, model: TextModel) -> bool:
    found = probed(model, layouts=("grouped", "solo"))
    return found.layout == "solo" and "log-probabilities differ from solo" in found.notes[0]


def finds_chunk_bug(probed: Probed, model: TextModel) -> bool:
    found = probed(model)
    assert found.layout == "grouped"
    return not found.mixes and "log-probabilities differ from solo" in found.notes[0]


@pytest.mark.parametrize(("bug", "seed"), each_with_a_seed(LAYOUT_BUGS))
def test_an_error_of_the_layout_is_found(
    deep: Deep, probed: Probed, monkeypatch: Patch, bug: str, seed: int
) -> None:
    LAYOUT_BUGS[bug](monkeypatch)
    assert finds_layout_bug(probed, deep(seed))


@pytest.mark.parametrize(("bug", "seed"), each_with_a_seed(CHUNK_BUGS))
def test_an_error_of_mixed_chunks_is_found(
    deep: Deep, probed: Probed, monkeypatch: Patch, bug: str, seed: int
) -> None:
    CHUNK_BUGS[bug](monkeypatch)
    assert finds_chunk_bug(probed, deep(seed))


def window_moved(by: int) -> Callable[[Patch], None]:
    def bug(patch: Patch) -> None:
        make = BatchRotatingKVCache.make_mask

        def moved(cache: Any, count: int, window_size: int | None = None, **more: Any) -> Any:
            return make(cache, count, (window_size or cache.max_size) + by, **more)

        patch.setattr(BatchRotatingKVCache, "make_mask", moved)

    return bug


def ring_from_another_place(patch: Patch) -> None:
    """Rows are merged as their rings lie, not in order of their tokens."""
    patch.setattr(RotatingKVCache, "_temporal_order", lambda cache, array: array)


def states_shared(patch: Patch) -> None:
    merge = ArraysCache.merge.__func__

    def merged(cls: Any, caches: Sequence[Any]) -> Any:
        return merge(cls, [caches[0] for _ in caches])

    patch.setattr(ArraysCache, "merge", classmethod(merged))


def states_stay_behind(patch: Patch) -> None:
    """What groups computed together is lost when one of them changes."""
    patch.setattr(batch_layout, "split", lambda together, caches, sizes: None)


def states_of_groups_swapped(patch: Patch) -> None:
    stack = grouped_kv._stacked

    def stacked(states: Sequence[Any], sizes: Sequence[int]) -> Any:
        return mx.roll(stack(states, sizes), 1, axis=0)

    patch.setattr(grouped_kv, "_stacked", stacked)


OTHER_BUGS = {
    "window a token short": ("gemma3_text", window_moved(-1)),
    "rings not in order": ("gemma3_text", ring_from_another_place),
    "states shared": ("qwen3_5_text", states_shared),
    "states stay behind": ("qwen3_5_text", states_stay_behind),
    "states of groups swapped": ("qwen3_5_text", states_of_groups_swapped),
}


@pytest.mark.parametrize("bug", OTHER_BUGS)
def test_errors_of_windows_and_states_are_found(
    deep: Deep, probed: Probed, monkeypatch: Patch, bug: str
) -> None:
    family, break_it = OTHER_BUGS[bug]
    model = deep(0, family, layers=8)
    assert probed(model).layout == "grouped"
    break_it(monkeypatch)
    assert finds_layout_bug(probed, model)


def state_run(changed: Callable[[StateRun], StateRun]) -> Callable[[Patch], None]:
    """`changed` gives what a recurrent layer takes for a chunk's states."""

    def bug(patch: Patch) -> None:
        def runs(*args: Any, **more: Any) -> StateRun:
            run = StateRun(*args, **more)
            return changed(run) if run.turned else run

        patch.setattr(grouped_kv, "StateRun", runs)

    return bug


STATE_BUGS = {
    "a chunk's state forgotten": state_run(lambda run: replace(run, cache=deepcopy(run.cache))),
    "a chunk's tokens apart": state_run(lambda run: replace(run, turned=False)),
    "a chunk of other rows": state_run(
        lambda run: replace(run, rows=slice(run.rows.start - 1, run.rows.stop - 1))
    ),
}


@pytest.mark.parametrize("bug", STATE_BUGS)
def test_errors_of_a_chunks_states_are_found(
    deep: Deep, probed: Probed, monkeypatch: Patch, bug: str
) -> None:
    model = deep(0, "qwen3_5_text", layers=8)
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
    for bugs, finds in ((LAYOUT_BUGS, finds_layout_bug), (CHUNK_BUGS, finds_chunk_bug)):
        for name, bug in bugs.items():
            with pytest.MonkeyPatch.context() as patch:
                bug(patch)
                if not finds(partial(probed, share=share), deep(seed)):
                    missed.append(name)
    assert not missed


# -- what noise is not


@dataclass
class Changed:
    """A model that gives other logits for a batch, however its rows lie together."""

    inner: TextModel
    change: Callable[[mx.array], mx.array]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

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
def test_equal_rows_that_are_wrong_are_no_noise(
    qwen3: TextModel, change: Callable[[mx.array], mx.array]
) -> None:
    model: Any = Changed(qwen3, change)
    found = probe.probe(model, qwen3.make_cache, qwen3.kv_layouts)
    assert (found.layout, found.mixes, len(found.notes)) == ("solo", False, 2)


def test_a_cache_that_cannot_hold_equal_rows_is_judged_all_the_same(
    qwen3: TextModel, monkeypatch: Patch
) -> None:
    def refuse(*args: Any) -> Any:
        raise TypeError("no batch")

    monkeypatch.setattr(solo_rows.noise, "copies", refuse)
    found = probe.probe(qwen3, qwen3.make_cache, ("grouped", "merged", "solo"))
    assert (found.layout, found.mixes) == ("grouped", False)
    no_mask(monkeypatch)
    assert probe.probe(qwen3, qwen3.make_cache, ("grouped", "solo")).layout == "solo"


def test_rows_that_decode_alone_need_no_proof(qwen3: TextModel) -> None:
    class Silent(Changed):
        def decode(self, tokens: mx.array, *args: Any) -> mx.array:
            raise AssertionError("nothing is decoded")

    model: Any = Silent(qwen3, lambda logits: logits)
    found = probe.probe(model, qwen3.make_cache, ("solo",))
    assert (found.layout, found.notes, found.noise_floor) == ("solo", (), 0.0)
    assert found.memory.row_bytes(256) == 256 * found.memory.token_bytes
