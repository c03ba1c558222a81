"""Models on this machine: in the Hub cache, and in the folders of LM Studio."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import BadRequest, ModelNotFound
from ..safe_open import obstacle
from .hub import (
    DEMOS,
    GGUF,
    cache_root,
    cached_models,
    is_repository,
    known,
    local_folder,
    not_gguf,
)

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

LM_STUDIO = (".lmstudio/models", ".cache/lm-studio/models")
"""Under the home folder: `publisher/model`."""


@dataclass(frozen=True)
class OnDisk:
    name: str
    """After `mlx/`: a repository, or a folder's path."""
    size: int
    """Bytes of all revisions."""
    fault: str = ""


def models_on_disk() -> list[OnDisk]:
    """Reads names and sizes, no weights."""
    return [
        *sorted(_of_hub(), key=_by_name),
        *sorted(_of_lm_studio(), key=_by_name),
    ]


def _by_name(found: OnDisk) -> str:
    return found.name.lower()


def _of_hub() -> Iterator[OnDisk]:
    sizes = {repo.repo_id: repo.size_on_disk for repo in _scanned().repos}
    for name in cached_models():
        size = sizes.get(name)
        folder = _repository_folder(name)
        yield OnDisk(name, _size(folder) if size is None else size, _fault_of_repository(name))


def _fault_of_repository(name: str) -> str:
    try:
        if local_folder(name, repository=True) is not None:
            return ""
    except (BadRequest, ModelNotFound) as error:
        return error.message
    files = [path.name for path in _repository_folder(name).glob("snapshots/*/*")]
    if any(each.endswith(GGUF) for each in files):
        return not_gguf(name)
    if any(each.endswith(".safetensors") for each in files) or not files:
        return f"incomplete: `mlx-provider pull {name}` fetches the rest"
    return "holds no weights for MLX"


def _of_lm_studio() -> Iterator[OnDisk]:
    roots = {path.resolve() for path in (Path.home() / each for each in LM_STUDIO) if path.is_dir()}
    for folder in (path for root in roots for path in root.glob("*/*") if path.is_dir()):
        if any(folder.glob(f"*{GGUF}")):
            yield OnDisk(str(folder), _size(folder), not_gguf(folder.name))
        elif any(folder.glob("*.safetensors")):
            whole = (folder / "config.json").is_file()
            yield OnDisk(str(folder), _size(folder), "" if whole else "has no config.json")


def remove(model: str) -> int:
    """Remove a repository, or one `@revision`, from the Hub cache. Returns the freed bytes. Raises
    `BadRequest` for a name outside of that cache, `ModelNotFound`."""
    if model in DEMOS or not is_repository(model):
        raise BadRequest(
            f"{model} is not a repository of the Hub cache: remove other folders yourself",
            param="model",
        )
    name, _, revision = model.partition("@")
    if name not in cached_models():
        raise ModelNotFound(f"{name} is not on this machine{known()}", param="model")
    cache, folder = _scanned(), _repository_folder(name)
    before = _size(folder)
    repo = next((each for each in cache.repos if each.repo_path == folder), None)
    if repo is None and not revision:  # a download that has only begun
        shutil.rmtree(folder)
        return before
    of_it = repo.revisions if repo else ()
    chosen = [
        each.commit_hash
        for each in of_it
        if not revision or revision == each.commit_hash or revision in each.refs
    ]
    if not chosen:
        raise ModelNotFound(f"{name} has no revision {revision} on this machine", param="model")
    cache.delete_revisions(*chosen).execute()
    left = _size(folder)
    if left and len(chosen) == len(of_it):
        raise BadRequest(f"{folder} could not be removed: see its owner and mode", param="model")
    return before - left


def _scanned() -> HFCacheInfo:
    from huggingface_hub import scan_cache_dir

    if not cache_root().is_dir() and (why := obstacle(cache_root())):
        raise BadRequest(f"the Hub cache {cache_root()} cannot be used: {why}")
    cache_root().mkdir(parents=True, exist_ok=True)
    return scan_cache_dir(cache_root())


def _repository_folder(name: str) -> Path:
    return cache_root() / f"models--{name.replace('/', '--')}"


def _size(folder: Path) -> int:
    """Files with several names count once."""
    files = {(s.st_dev, s.st_ino): s.st_size for s in _states(folder)}
    return sum(files.values())


def _states(folder: Path) -> Iterator[os.stat_result]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path.stat()
