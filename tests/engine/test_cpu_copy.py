"""Arrays joined along their token axis, however that is done."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_provider.upstream import cpu_copy, cpu_device


def pieces(dtype: mx.Dtype) -> list[mx.array]:
    stack = mx.random.randint(0, 100, (3, 1, 2, 7, 4)).astype(dtype)
    return [stack[1], stack[2][:, :, 2:5], stack[0][..., :1, :]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32])
def test_joined_as_upstream_joins(dtype: mx.Dtype) -> None:
    runs, slacks = [pieces(dtype), pieces(dtype), pieces(dtype)[:1]], [0, 5, 2]
    before = [[mx.array(piece) for piece in run] for run in runs]
    found = cpu_copy.joined(runs, slacks)
    for array, run, slack in zip(found, runs, slacks, strict=True):
        assert array.dtype == dtype
        blank = mx.zeros((1, 2, slack, 4), dtype=dtype)
        assert mx.array_equal(array, mx.concatenate([*run, blank], axis=-2)).item()
    for array in found:
        array[:] = 0
    pairs = [pair for both in zip(runs, before, strict=True) for pair in zip(*both, strict=True)]
    assert all(mx.array_equal(a, b).item() for a, b in pairs)


def test_runs_of_several_kinds_in_one_go() -> None:
    runs = [pieces(dtype) for dtype in (mx.bfloat16, mx.float32, mx.uint32)]
    found = cpu_copy.joined(runs, [1, 1, 1])
    assert [array.dtype for array in found] == [mx.bfloat16, mx.float32, mx.uint32]


def test_one_piece_is_copied() -> None:
    (piece,) = given = pieces(mx.float32)[:1]
    (found,) = cpu_copy.joined([given], [0])
    found[:] = -1
    assert mx.min(piece).item() >= 0


@pytest.mark.skipif(not cpu_device.in_use(), reason="MLX is fast there")
def test_a_cpu_leaves_it_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mx, "concatenate")
    assert cpu_copy.joined([pieces(mx.float32)], [2])[0].shape == (1, 2, 13, 4)
