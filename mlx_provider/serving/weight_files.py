"""The weights of a model folder: their bytes and dtype by the headers of the files, checks of the
files before a load, and `wire`, which keeps loaded weights in the memory of a Mac.

macOS may move GPU buffers out of memory, and back before each pass. MLX 0.32.4 keeps up to
`set_wired_limit` bytes there (backend/metal/resident.cpp), by default 0. Another server published
a gain of 31 % for prompts on an M3 Ultra. `wire` takes at most the weights' bytes and leaves memory
free: wired temporary buffers have caused panics of Macs (mlx #3186)."""

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
"""Largest share of the memory limit for weights that are loaded as float32."""
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
"""Matrices of these dtypes hold 4-bit weights, two per byte, which mlx-lm and mlx-vlm convert while
they load (AWQ, GPTQ, compressed tensors, blocks of MXFP4)."""
DESCRIPTIONS = (
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "preprocessor_config.json"),
    *("processor_config.json", "video_preprocessor_config.json", INDEX),
)
"""JSON objects that libraries read, beside `config.json`."""
ADAPTER = "adapter_config.json"
WIRED_SHARE = 0.65
"""Largest wired share of the machine's memory."""
NEVER_WIRED = 8 * 2**30
"""Bytes of the machine's memory."""


def weights_dtype(chosen: str, expanded_bytes: int, limit: int) -> str | None:
    """The dtype in which to load weights; `None`: the checkpoint's own. `chosen`: the option, of
    which `auto` is float32 on a CPU if the weights as float32, `expanded_bytes`, take at most
    `EXPANDED_SHARE` of the memory limit."""
    if chosen not in ("auto", "native"):
        return chosen
    small = expanded_bytes <= EXPANDED_SHARE * limit
    return "float32" if chosen == "auto" and small and mx.default_device() == mx.cpu else None


def weights_estimate(
    folder: Path, adapter: Path | None = None, *, expanded: int | None = None
) -> int:
    """Bytes of the loaded weights. `expanded`: bytes per value if they are loaded in another dtype,
    with quantised ones dequantised. Tensors that are not loaded count, too (an MTP head, a tower
    that a text model does not use), and a file that is not safetensors with its size."""
    own = _tensors(_weight_files(folder))
    added = {} if adapter is None else _tensors(sorted(adapter.glob("*.safetensors")))
    if expanded is None:
        return sum(tensor.nbytes for tensor in (*own.values(), *added.values()))
    config = read_json(folder / "config.json")
    quantization = config.get("quantization") or config.get("quantization_config") or {}
    quantization = quantization if isinstance(quantization, dict) else {}
    return sum(_expand(tensors, expanded, quantization) for tensors in (own, added))


def stored_tensors(folder: Path) -> dict[str, int]:
    """Bytes by name, including tensors that are not loaded."""
    return {name: t.nbytes for name, t in _tensors(sorted(folder.glob("*.safetensors"))).items()}


def extent(folder: Path, adapter: Path | None = None) -> tuple[int | None, int | None]:
    """The number of tensors, and an upper limit of their values, as if each took one bit. Both are
    `None` if they are unknown, because there is no file or one is not safetensors."""
    files = [*_weight_files(folder), *([] if adapter is None else adapter.glob("*.safetensors"))]
    tensors = _tensors(files)
    if not tensors or any(str(path) in tensors for path in files):  # stands for a broken file
        return None, None
    return len(tensors), sum(tensor.nbytes for tensor in tensors.values()) * 8


def broken_files(folder: Path) -> list[str]:
    """What is wrong with the weight files, one line per problem. Reads only headers."""
    names = sorted(_index_names(folder))
    problems = [f"{name} is missing" for name in names if not (folder / name).is_file()]
    for path in _weight_files(folder):
        try:
            ends = [int(entry["data_offsets"][1]) for entry in _header(path).values()]
            with path.open("rb") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")  # of the data
            lacks = begin + max(ends, default=0) - path.stat().st_size
        except UNREADABLE as error:
            problems.append(f"{path.name} is no safetensors file ({type(error).__name__})")
            continue
        if lacks > 0:
            problems.append(f"{path.name} is cut short by {lacks} bytes")
    return problems


def _expand(tensors: Mapping[str, _Tensor], width: int, quantization: Mapping[str, Any]) -> int:
    """Bytes with `width` bytes per weight. `quantization`: of config.json, with the number of
    values per scale (`group_size`) for all layers and for single ones (mlx-lm 0.32.2)."""
    nbytes = 0
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        scales = tensors.get(f"{layer}.scales") if f"{layer}.weight" in tensors else None
        weights = tensor.unpacked
        if scales is not None and part == "weight":
            own = quantization.get(layer)
            group = {**quantization, **(own if isinstance(own, dict) else {})}.get("group_size")
            weights = scales.values * (group if isinstance(group, int) else USUAL_GROUP)
        elif scales is not None and part in ("scales", "biases"):
            weights = 0
        nbytes += tensor.nbytes if weights is None else weights * width
    return nbytes


def _weight_files(folder: Path) -> list[Path]:
    """Files that the loaders of mlx-lm 0.32.2 and mlx-vlm 0.7.10 (`utils.py`) may read."""
    indexed = (folder / name for name in _index_names(folder))
    usual = {*folder.glob("model*.safetensors"), *filter(Path.is_file, indexed)}
    everything = (p for p in folder.glob("*.safetensors") if p.name != "consolidated.safetensors")
    return sorted(usual or everything)


def _index_names(folder: Path) -> set[str]:
    """Names of the files that the index lists. Empty if it is missing or broken."""
    try:
        index = from_json(read_bounded(folder / INDEX, LARGEST_INDEX))
        return set(map(str, index["weight_map"].values()))
    except UNREADABLE:
        return set()


@dataclass(frozen=True)
class _Tensor:
    values: int  # as stored: a packed one holds several weights
    nbytes: int  # once loaded
    unpacked: int | None  # number of weights; `None`: they are loaded as stored


def _tensors(files: Iterable[Path]) -> dict[str, _Tensor]:
    """By name, so one in two files counts once. A broken file is one tensor under its path."""
    tensors: dict[str, _Tensor] = {}
    for path in files:
        try:
            tensors |= {name: _tensor(entry) for name, entry in _header(path).items()}
        except UNREADABLE:
            tensors[str(path)] = _Tensor(0, path.stat().st_size if path.is_file() else 0, None)
    return tensors


def _header(path: Path) -> dict[str, Mapping[str, Any]]:
    """The entry of each tensor, by name. Raises errors of `UNREADABLE`."""
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
    if "F" in dtype:  # floats of any width
        return _Tensor(values, nbytes, unpacked=values)
    packed = len(shape) > 1 and dtype in PACKED
    return _Tensor(values, nbytes, unpacked=nbytes * PER_BYTE if packed else None)


def check_folder(folder: Path, adapter: Path | None = None) -> None:
    """Check for content that would block or break a reader: deep JSON, layers without weights.
    Raises `BadRequest` that names the file, or `UnsupportedModel` that names the key."""
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
    keys = "memory_size", "max_recommended_working_set_size"
    memory, recommended = (int(info.get(key, 0)) for key in keys)
    limit = max(0, min(nbytes, int(WIRED_SHARE * memory), memory - NEVER_WIRED, recommended))
    mx.set_wired_limit(limit)
    log.info("%d bytes of weights are wired", limit)
