"""Attention of rows, drafts and chunks to a shared prefix equals that to separate keys."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention as upstream

from mlx_provider.records import Parts, Run
from mlx_provider.upstream.attention import route_attention
from mlx_provider.upstream.cache_classes import KVCache, QuantizedKVCache
from mlx_provider.upstream.shared_kv import FEW, Shared, divide

HEADS, KV_HEADS, WIDTH, PREFIX = 4, 2, 64, 70
SCALE = WIDTH**-0.5
TURNED = {"a row": 1, "drafts": 3, "a chunk": FEW + 5}
"""Tokens of parts whose tokens stand in the places of rows."""


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_parts_with_one_prefix_get_the_result_of_each_alone(
    bits: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "gpu":  # changes only the choice of the product; it runs on this machine's device
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    mx.random.seed(3)

    def cache() -> Any:
        return KVCache() if bits is None else QuantizedKVCache(group_size=32, bits=bits)

    first = random(2, 1, KV_HEADS, PREFIX, WIDTH)
    prefix, runs, keys, values, masks, wanted, asking, at = None, [], [], [], [], [], [], 0
    for tail, tokens in enumerate(TURNED.values(), 4):
        own, alone = cache(), cache()
        behind = random(2, 1, KV_HEADS, tail + tokens, WIDTH)
        for each in (own, alone):
            each.update_and_fetch(*first)
        made = divide(own, PREFIX)
        prefix = prefix or made
        own.prefix = prefix
        queries = random(1, HEADS, tokens, WIDTH)
        mask = "causal" if tokens > 1 else None
        whole = alone.update_and_fetch(*behind)
        # upstream scales quantised queries in place
        wanted.append(upstream(queries + 0, *whole, alone, SCALE, mask).swapaxes(0, 2))
        pair = own.update_and_fetch(*behind)
        assert isinstance(pair[0], Shared)
        keys.append(pair[0])
        values.append(pair[1])
        masks.append(mask)
        runs.append(Run(own, slice(at, at + tokens), turned=True))
        asking.append(queries.swapaxes(0, 2))
        at += tokens
    got = route_attention(upstream)(
        mx.concatenate(asking), Parts(keys, runs), Parts(values, runs), None, SCALE, mask=masks
    )
    assert mx.abs(got - mx.concatenate(wanted)).max().item() < 1e-5
