"""The expected memory of weights, from the headers of their files."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_provider.serving.weight_files import weights_estimate
from tiny import build


def save(path: Path, **shapes: tuple[tuple[int, ...], mx.Dtype]) -> None:
    mx.save_safetensors(
        str(path), {name: mx.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    )


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "qwen3_vl", "gemma3"])
def test_the_estimate_equals_the_memory_after_loading(family: str, tmp_path: Path) -> None:
    folder = build(tmp_path / "m", family)
    weights = mx.load(str(folder / "model.safetensors"))
    assert weights_estimate(folder) == sum(array.nbytes for array in weights.values())


def test_the_size_of_each_dtype_is_counted(tmp_path: Path) -> None:
    kinds = (mx.uint8, mx.bool_, mx.float16, mx.bfloat16, mx.uint32, mx.float32, mx.int64)
    save(tmp_path / "model.safetensors", **{f"t{i}": ((3, 5), k) for i, k in enumerate(kinds)})
    assert weights_estimate(tmp_path) == 15 * (1 + 1 + 2 + 2 + 4 + 4 + 8)


def test_a_tensor_of_two_files_counts_once(tmp_path: Path) -> None:
    save(tmp_path / "model-1.safetensors", a=((4,), mx.float32), b=((2,), mx.float32))
    save(tmp_path / "model-2.safetensors", b=((2,), mx.float32))
    assert weights_estimate(tmp_path) == 24


def test_files_that_no_loader_reads_do_not_count(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", a=((4,), mx.float32))
    save(tmp_path / "consolidated.safetensors", x=((400,), mx.float32))
    save(tmp_path / "adapters.safetensors", x=((400,), mx.float32))
    assert weights_estimate(tmp_path) == 16


def test_shards_are_found_by_pattern_and_by_the_index(tmp_path: Path) -> None:
    save(tmp_path / "weights-1.safetensors", a=((4,), mx.float32))
    assert weights_estimate(tmp_path) == 16
    save(tmp_path / "model.safetensors", b=((4,), mx.float32))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "weights-1.safetensors", "c": "gone"}}))
    assert weights_estimate(tmp_path) == 32
    index.write_text("[]")
    assert weights_estimate(tmp_path) == 16


def test_the_weights_of_an_adapter_are_counted(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    save(tmp_path / "model.safetensors", a=((4,), mx.float32))
    save(tmp_path / "adapter" / "adapters.safetensors", a=((3,), mx.float32))
    assert weights_estimate(tmp_path, tmp_path / "adapter") == 28


def test_eight_bit_floats_count_as_sixteen(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [10], "data_offsets": [0, 10]}})
    text = header.encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(10))
    assert weights_estimate(tmp_path) == 20


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0[]", b"\0" * 30])
def test_a_file_of_another_format_counts_with_its_size(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weights_estimate(tmp_path) == len(content)


def test_a_folder_without_weights_counts_zero(tmp_path: Path) -> None:
    assert weights_estimate(tmp_path) == 0
