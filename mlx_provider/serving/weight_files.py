"""The weights of a model folder: bytes and dtype by the headers of their files, checks before
anybody reads them, and residence on Metal.

macOS may move GPU buffers out of memory, and back before each pass. MLX 0.32.4 keeps buffers
resident up to `set_wired_limit` (backend/metal/resident.cpp), by default 0. Published gains of
another server: 31 % for prompts on an M3 Ultra. `wire` takes at most the weights'
bytes and leaves memory free: wired temporary buffers have caused panics of Macs (mlx #3186)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
from pydantic_core import from_json

from ..families.checkpoint import read_json
from ..safe_open import read_bounded
from .estimate import check_sizes

log = logging.getLogger(__name__)
EXPANDED_SHARE = 0.5
"""Largest share of the memory limit for expanded weights."""
INDEX = "model.safetensors.index.json"
LARGEST_INDEX = 2**28
UNREADABLE = (LookupError, OSError, OverflowError, TypeError, ValueError, AttributeError)
"""Errors of a file that is no JSON object of the expected form."""
LARGEST_HEADER = 100_000_000
"""Bytes: the format's own limit (safetensors 0.6, `MAX_HEADER_SIZE`)."""
WIDENED = ("F8_E4M3", "F8_E5M2")
"""Eight-bit floats become 16-bit weights (mlx-vlm 0.7.10, `fp8.py`)."""
USUAL_GROUP = 64
"""Values per scale if config.json does not say (mlx-lm's default)."""
PACKED, PER_BYTE = ("U8", "I32", "U32"), 2
"""Matrices of these dtypes hold packed 4-bit weights, which mlx-lm and mlx-vlm convert while they
load (AWQ, GPTQ, compressed tensors, blocks of MXFP4)."""
DESCRIPTIONS = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    INDEX,
)
"""JSON objects that libraries read."""
ADAPTER = "adapter_config.json"
WIRED_SHARE = 0.65
"""Largest wired share of the machine's memory."""
NEVER_WIRED = 8 * 2**30
"""Bytes of the machine's memory."""


def weights_dtype(chosen: str, expanded_bytes: int, limit: int) -> str | None:
    """`None`: the checkpoint's own. `auto` is float32 on a CPU if that fits into `limit`."""
    if chosen not in ("auto", "native"):
        return chosen
    small = expanded_bytes <= EXPANDED_SHARE * limit
    return "float32" if chosen == "auto" and small and mx.default_device() == mx.cpu else None


def weights_estimate(
    folder: Path, adapter: Path | None = None, *, expanded: int | None = None
) -> int:
    """Bytes of the loaded weights. `expanded`: bytes per value if they are loaded in another dtype,
    with quantised ones dequantised.

    Tensors that are not loaded count, too (an MTP head, a tower that a text model does not use),
    and a file that is not safetensors with its size."""
    own = _tensors(_weight_files(folder))
    added = {} if adapter is None else _tensors(sorted(adapter.glob("*.safetensors")))
    if expanded is None:
        return sum(tensor.nbytes for tensor in (*own.values(), *added.values()))
    config = read_json(folder / "config.json")
    sizes = config.get("quantization") or config.get("quantization_config") or {}
    sizes = sizes if isinstance(sizes, dict) else {}
    return sum(_expand(tensors, expanded, sizes) for tensors in (own, added))


def stored_tensors(folder: Path) -> dict[str, int]:
    """Bytes by name, including tensors that are not loaded."""
    return {name: t.nbytes for name, t in _tensors(sorted(folder.glob("*.safetensors"))).items()}


def extent(folder: Path, adapter: Path | None = None) -> tuple[int | None, int | None]:
    """Number of tensors, and an upper limit of their values (one per bit). `None`: unknown, because
    a file is not safetensors."""
    files = [*_weight_files(folder), *([] if adapter is None else adapter.glob("*.safetensors"))]
    found = _tensors(files)
    if not found or any(name in found for name in map(str, files)):
        return None, None
    return len(found), sum(tensor.nbytes for tensor in found.values()) * 8


def broken_files(folder: Path) -> list[str]:
    """One line per problem. Reads only headers."""
    names = sorted(_index_names(folder))
    found = [f"{name} is missing" for name in names if not (folder / name).is_file()]
    for path in _weight_files(folder):
        try:
            ends = [int(entry["data_offsets"][1]) for entry in _header(path).values()]
            with path.open("rb") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")
            lacks = begin + max(ends, default=0) - path.stat().st_size
        except UNREADABLE as error:
            found.append(f"{path.name} is no safetensors file ({type(error).__name__})")
            continue
        if lacks > 0:
            found.append(f"{path.name} is cut short by {lacks} bytes")
    return found


def _expand(tensors: Mapping[str, _Tensor], width: int, sizes: Mapping[str, Any]) -> int:
    """Bytes with `width` bytes per value. `sizes`: of groups with one scale, by layer or for all
    (mlx-lm 0.32.2: `quantization` of config.json)."""
    found = 0
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        scales = tensors.get(f"{layer}.scales") if f"{layer}.weight" in tensors else None
        values = tensor.unpacked
        if scales is not None and part == "weight":
            own = sizes.get(layer)
            group = {**sizes, **(own if isinstance(own, dict) else {})}.get("group_size")
            values = scales.values * (group if isinstance(group, int) else USUAL_GROUP)
        elif scales is not None and part in ("scales", "biases"):
            values = 0
        found += tensor.nbytes if values is None else values * width
    return found


def _weight_files(folder: Path) -> list[Path]:
    """Files that the loaders of mlx-lm 0.32.2 and mlx-vlm 0.7.10 (`utils.py`) may read."""
    indexed = (folder / name for name in _index_names(folder))
    found = {*folder.glob("model*.safetensors"), *filter(Path.is_file, indexed)}
    everything = (p for p in folder.glob("*.safetensors") if p.name != "consolidated.safetensors")
    return sorted(found or everything)


def _index_names(folder: Path) -> set[str]:
    """Empty if the index is missing or broken."""
    try:
        index = from_json(read_bounded(folder / INDEX, LARGEST_INDEX))
        return set(map(str, index["weight_map"].values()))
    except UNREADABLE:
        return set()


@dataclass(frozen=True)
class _Tensor:
    values: int
    """As stored: a packed one holds several weights."""
    nbytes: int
    """Once loaded."""
    unpacked: int | None
    """Number of weights; `None`: they are loaded as stored."""


def _tensors(files: Iterable[Path]) -> dict[str, _Tensor]:
    """A tensor in two files counts once."""
    found: dict[str, _Tensor] = {}
    for path in files:
        try:
            found |= {name: _tensor(entry) for name, entry in _header(path).items()}
        except UNREADABLE:
            found[str(path)] = _Tensor(0, path.stat().st_size if path.is_file() else 0, None)
    return found


def _header(path: Path) -> dict[str, Mapping[str, Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = from_json(file.read(length)) if length <= LARGEST_HEADER else None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not safetensors")
    header.pop("__metadata__", None)
    return header


def _tensor(entry: Mapping[str, Any]) -> _Tensor:
    shape, dtype = [int(side) for side in entry["shape"]], str(entry["dtype"])
    begin, end = entry["data_offsets"]
    nbytes = (int(end) - int(begin)) * (2 if dtype in WIDENED else 1)
    values = prod(shape)
    packed = len(shape) > 1 and dtype in PACKED
    weights = values if "F" in dtype else nbytes * PER_BYTE if packed else None
    return _Tensor(values, nbytes, weights)


def check_folder(folder: Path, adapter: Path | None = None) -> None:
    """Refuse content that would block or break a reader: deep JSON, layers without weights. Raises
    `BadRequest` that names the file, or `UnsupportedModel` that names the key."""
    for name in DESCRIPTIONS:
        read_json(folder / name)
    check_sizes(read_json(folder / "config.json"), *extent(folder))
    if adapter is not None:
        check_sizes(read_json(adapter / ADAPTER), *extent(folder, adapter))


def wire(nbytes: int) -> None:
    """Keep so many bytes of evaluated weights resident (engine thread). No effect without Metal."""
    if not mx.metal.is_available():
        return
    mx.clear_cache()  # free buffers of the load would count
    info = mx.device_info()
    memory, recommended = (
        int(info.get(name, 0)) for name in ("memory_size", "max_recommended_working_set_size")
    )
    limit = max(0, min(nbytes, int(WIRED_SHARE * memory), memory - NEVER_WIRED, recommended))
    mx.set_wired_limit(limit)
    log.info("%d bytes of weights are wired", limit)
