"""One file of the disk tier: a segment or a snapshot, as safetensors with a checksum.

The header's metadata holds everything but arrays, so that an index can be built from headers.
bfloat16, which numpy lacks, is stored as its 16 bits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ...installed import installed_version
from ...safe_open import open_own
from .arrays import ArrayPack
from .key import Ids
from .segments import Segment
from .snapshots import Snapshot

FORMAT = 1
SUFFIX = ".safetensors"
TEMPORARY = ".tmp"
MAX_HEADER = 2**24

HostArray = NDArray[Any]


class BadFile(Exception):
    """A file that is not one of ours, of other versions, or damaged; says why."""


@dataclass(frozen=True)
class Header:
    """What a file holds, without its arrays."""

    key: str
    """Hex digest of the `CacheKey`."""
    parent: str
    """Hex digest of key and tokens `0 .. start`."""
    start: int
    tokens: Ids
    """Tokens of the segment; empty: a snapshot at `start`."""
    complete: bool
    structure: Mapping[str, Any]
    """How the arrays make a `Segment` or `Snapshot`."""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def name(self) -> str:
        """File name: the same content always has the same one."""
        ids = hashlib.blake2b(self.tokens.tobytes(), digest_size=8).hexdigest()
        kind = "kv" if len(self.tokens) else "state"
        return f"{self.parent}-{ids}-{int(self.complete)}.{kind}{SUFFIX}"


def versions() -> str:
    """What the meaning of cached arrays depends on besides the model."""
    packages = (f"{name} {installed_version(name) or 'none'}" for name in ("mlx-lm", "mlx-vlm"))
    return ", ".join([f"format {FORMAT}", *packages])


def segment_structure(segment: Segment) -> dict[str, Any]:
    return {"layers": segment.layers, **_pack_structure(segment.pack)}


def snapshot_structure(snapshot: Snapshot) -> dict[str, Any]:
    return {"layers": list(snapshot.layers.items()), **_pack_structure(snapshot.pack)}


def to_host(pack: ArrayPack) -> list[HostArray]:
    """Copies of a pack's stacks that any thread may use."""
    return [np.array(_bits(stack)) for stack in pack.stacks]


def segment_of(header: Header, arrays: Sequence[HostArray]) -> Segment:
    """The segment again, on the device (engine thread)."""
    layers = tuple((leaf, count) for leaf, count in header.structure["layers"])
    return Segment(len(header.tokens), _pack(header, arrays), layers)


def snapshot_of(header: Header, arrays: Sequence[HostArray]) -> Snapshot:
    """The snapshot again, on the device (engine thread)."""
    return Snapshot(dict(header.structure["layers"]), _pack(header, arrays))


def write(folder: Path, header: Header, arrays: Sequence[HostArray], versions: str) -> Path:
    """Write a file so that after a crash it is there whole, or not at all. Mode 0600.

    Raises `BadFile` for arrays that the format cannot hold, and `OSError`.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save

    metadata = _metadata(header, versions)
    tensors = {f"{i:04}": array for i, array in enumerate(arrays)}
    metadata["checksum"] = _checksum(metadata, arrays)
    try:
        data = save(tensors, metadata)
    except SafetensorError as reason:
        raise BadFile(str(reason)) from reason
    path = folder / header.name
    temporary = folder / f".{header.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    entries = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(entries)
    finally:
        os.close(entries)
    return path


def read_header(path: Path, versions: str) -> Header:
    """Raises `BadFile`, or `OSError` where the file cannot be read."""
    with os.fdopen(open_own(path), "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER:
            raise BadFile("no safetensors header")
        return _header(_json(file.read(size)), versions)


def read(path: Path, versions: str) -> tuple[Header, list[HostArray]]:
    """Raises `BadFile`, or `OSError` where the file cannot be read."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    with os.fdopen(open_own(path), "rb") as file:
        data = file.read()
    metadata = _json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header = _header(metadata, versions)
    try:
        tensors = load(data)
    except SafetensorError as reason:
        raise BadFile(str(reason)) from reason
    arrays = [tensors[name] for name in sorted(tensors)]
    if metadata.pop("checksum", "") != _checksum(metadata, arrays):
        raise BadFile("wrong checksum")
    return header, arrays


def _metadata(header: Header, versions: str) -> dict[str, str]:
    return {
        "versions": versions,
        "key": header.key,
        "parent": header.parent,
        "start": str(header.start),
        "tokens": base64.b64encode(header.tokens.astype("<i8").tobytes()).decode(),
        "complete": str(int(header.complete)),
        "structure": json.dumps(header.structure),
    }


def _json(data: bytes) -> dict[str, str]:
    try:
        metadata = from_json(data)["__metadata__"]
    except (ValueError, KeyError, TypeError) as reason:
        raise BadFile("no header of ours") from reason
    if not isinstance(metadata, dict):
        raise BadFile("no header of ours")
    return metadata


def _header(metadata: Mapping[str, str], versions: str) -> Header:
    if metadata.get("versions") != versions:
        raise BadFile(f"made by {metadata.get('versions')}, this is {versions}")
    try:
        return Header(
            metadata["key"],
            metadata["parent"],
            int(metadata["start"]),
            np.frombuffer(base64.b64decode(metadata["tokens"]), "<i8").astype(np.int64),
            metadata["complete"] == "1",
            from_json(metadata["structure"]),
        )
    except (ValueError, KeyError, TypeError) as reason:
        raise BadFile("damaged header") from reason


def _checksum(metadata: Mapping[str, str], arrays: Sequence[HostArray]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _pack_structure(pack: ArrayPack) -> dict[str, Any]:
    return {"places": pack.places, "dtypes": [str(stack.dtype) for stack in pack.stacks]}


def _pack(header: Header, arrays: Sequence[HostArray]) -> ArrayPack:
    dtypes = header.structure["dtypes"]
    stacks = [
        mx.array(array).view(mx.bfloat16) if "bfloat16" in dtype else mx.array(array)
        for array, dtype in zip(arrays, dtypes, strict=True)
    ]
    mx.eval(stacks)
    return ArrayPack(tuple(stacks), tuple((g, r) for g, r in header.structure["places"]))


def _bits(stack: Any) -> Any:
    return stack.view(mx.uint16) if stack.dtype == mx.bfloat16 else stack
