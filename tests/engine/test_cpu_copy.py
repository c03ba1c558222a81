"""Arrays joined along their token axis, however that is done."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_provider.upstream import cpu_copy, cpu_device


def pieces(dtype: mx.Dtype) -> list[mx.array]:
    stack = mx.random.randint(0, 100, (3, 1, 2, 7, 4)).astype(dtype)
    return [stack[1], stack[2][:, :, 2:5], stack[0][..., :1, :]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32])
@pytest.mark.parametrize("slack", [0, 5])
def test_joined_as_upstream_joins(dtype: mx.Dtype, slack: int) -> None:
    given = pieces(dtype)
    before = [mx.array(piece) for piece in given]
    blank = mx.zeros((1, 2, slack, 4), dtype=dtype)
    found = cpu_copy.joined(given, slack)
    assert found.dtype == dtype
    assert mx.array_equal(found, mx.concatenate([*given, blank], axis=-2)).item()
    found[:] = 0
    assert all(mx.array_equal(a, b).item() for a, b in zip(given, before, strict=True))


def test_one_piece_is_copied() -> None:
    (piece,) = given = pieces(mx.float32)[:1]
    found = cpu_copy.joined(given, 0)
    found[:] = -1
    assert mx.min(piece).item() >= 0


@pytest.mark.skipif(not cpu_device.in_use(), reason="MLX is fast there")
def test_a_cpu_leaves_it_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mx, "concatenate")
    assert cpu_copy.joined(pieces(mx.float32), 2).shape == (1, 2, 13, 4)
