"""Finds a model's folder (shipped, on disk, in the local Hub cache, or on the Hub), reads its small
files before a load or a download, and lists the models in the local Hub cache."""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from ..errors import BadRequest, MLXProviderError, ModelNotFound
from ..families.checkpoint import named_context, named_template, read_json, text_fields
from ..registry import PluginRegistry
from ..safe_open import obstacle

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

DEMOS = {"demo": "model", "demo-hybrid": "hybrid"}
"""Names of the shipped models, and their folders."""
REACH = 0.8
"""Seconds until the Hub counts as unreachable."""
GGUF = ".gguf"
TEMPLATE = "chat_template.jinja"
TEMPLATES = ("chat_template.json", "tokenizer_config.json")
"""Files with the chat template as `chat_template`, if there is no `TEMPLATE`."""
PATTERNS = ["*.json", "*.safetensors", "*.py", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
"""Files that are downloaded."""


def folder_of(model: str, *, repository: bool = False) -> Path:
    """The folder of `model`: one of `DEMOS`, a path, or a repository `owner/name[@revision]`, which
    is downloaded if missing. `repository`: only that. Raises `ModelNotFound` with a list of local
    models, within `REACH` if the Hub is unreachable; `BadRequest` for a folder without a model."""
    return local_folder(model, repository=repository) or download(model)


def local_folder(model: str, *, repository: bool = False) -> Path | None:
    """Like `folder_of` without a download. `None`: not on this machine."""
    if model in DEMOS:
        return Path(__file__).parents[1] / "demo" / DEMOS[model]
    path = _path(model)
    if model.endswith(GGUF) and path.is_file():
        raise BadRequest(f"{path.stem}: {not_gguf(path.stem)}", param="model")
    if not repository and path.is_dir():
        if not (path / "config.json").is_file():
            reason = f"{path} holds no config.json: it is not a model folder"
            raise BadRequest(reason, param="model")
        return _check_files(path)
    if not is_repository(model):
        raise ModelNotFound(no_folder(model) + list_known(), param="model")
    return _cached_folder(*_repository(model))


def full_name(model: str) -> str:
    """The name for an engine, which has another working folder: of a folder, its absolute path."""
    model = model.removeprefix("mlx/")
    if model in DEMOS or not _path(model).is_dir():
        return model
    return os.fspath(_path(model).resolve())


def no_folder(name: str) -> str:
    """The text of an error: `name` is not a folder."""
    path = _path(name)
    if path.is_absolute():
        return f"no folder {path} on the engine's machine"
    problem = f"no folder {name!r} on the engine's machine ({Path.cwd() / path} does not exist)"
    return f"{problem}: give the full path of a folder"


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))  # noqa: PTH111 - for an unknown user, `Path` raises


def is_repository(model: str) -> bool:
    return not model.startswith(("/", "~", ".")) and model.count("/") == 1


def _repository(model: str) -> tuple[str, str | None]:
    repo, _, revision = model.partition("@")
    return repo, revision or None


@dataclass(frozen=True)
class Outline:
    config: Mapping[str, Any]
    weight_bytes: int
    chat_template: str = ""  # empty: none, or several by name
    here: bool = False  # whether it is on this machine


def outline(model: str) -> Outline:
    """The outline of a repository on the Hub, from small responses that are not stored. Raises
    `ModelNotFound`, within `REACH` if the Hub is unreachable; `BadRequest` for unusable files."""
    repo, revision = _repository(model)
    files = _list_files(repo, revision)
    get = partial(_get, repo, f"{repo}/resolve/{revision or 'main'}")
    weights = sum(size for name, size in files.items() if _is_weights(name))
    config = _json_object(repo, get("config.json"))
    if TEMPLATE in files:
        return Outline(config, weights, get(TEMPLATE).text)
    objects = [_json_object(repo, get(name)) for name in TEMPLATES if name in files]
    texts = (fields.get("chat_template") for fields in objects)
    return Outline(config, weights, next((text for text in texts if isinstance(text, str)), ""))


def _list_files(repo: str, revision: str | None) -> dict[str, int]:
    """Bytes by name. Raises `ModelNotFound`, and `BadRequest` for GGUF without safetensors."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        reason = f"{repo} is not on this machine, and HF_HUB_OFFLINE is set"
        raise ModelNotFound(reason + list_known())
    response = _get(repo, f"api/models/{repo}/revision", f"{revision or 'main'}?blobs=true")
    siblings = _json_object(repo, response).get("siblings", ())
    files = {file.get("rfilename", ""): file.get("size") or 0 for file in siblings}
    if any(name.endswith(GGUF) for name in files) and not any(map(_is_weights, files)):
        raise BadRequest(f"{repo}: {not_gguf(repo)}", param="model")
    return files


def _json_object(repo: str, response: httpx.Response) -> dict[str, Any]:
    try:
        content = from_json(response.content)
    except ValueError as error:
        raise BadRequest(f"{repo}: {response.url.path}: {error}", param="model") from None
    if not isinstance(content, dict):
        raise BadRequest(f"{repo}: {response.url.path} holds no JSON object", param="model")
    return content


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and name != "consolidated.safetensors"


def _check_files(folder: Path) -> Path:
    """Returns `folder`. Raises `BadRequest` for a pipe or device, which would block a reader."""
    for path in (path for pattern in PATTERNS for path in folder.glob(pattern)):
        try:
            kind = path.stat().st_mode
        except OSError:
            continue  # a broken link blocks no reader
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise BadRequest(f"{path} is no regular file: remove it", param="model")
    return folder


def _cached_folder(repo: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    find = partial(snapshot_download, local_files_only=True, allow_patterns=PATTERNS)
    try:
        folder = Path(find(repo, revision=revision))
    except HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is no repository name: {error}", param="model") from error
    except LocalEntryNotFoundError:
        return None
    complete = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return _check_files(folder) if complete else None


def download(model: str) -> Path:
    """Fetch the newest version of a repository, only new files. Returns its folder. Raises
    `ModelNotFound`, and `BadRequest` for a repository with GGUF files and no safetensors."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo, revision = _repository(model)
    _list_files(repo, revision)
    log.info("downloading %s", repo)
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        raise ModelNotFound(f"{repo} could not be downloaded: {error}", param="model") from error


def _get(repo: str, path: str, name: str) -> httpx.Response:
    """A successful response of the Hub, else raises `ModelNotFound`."""
    import httpx
    from huggingface_hub import constants, get_token

    try:
        token = get_token()
    except OSError:  # a file that this user cannot read
        token = None
    headers = {"authorization": f"Bearer {token}"} if token else {}
    address = f"{constants.ENDPOINT}/{path}/{name}"
    try:
        response = httpx.get(address, headers=headers, timeout=REACH, follow_redirects=True)
    except httpx.HTTPError as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        problem = f"{repo} is not on this machine, and the Hub is out of reach ({reason})"
        raise ModelNotFound(problem + list_known(), param="model") from error
    if response.status_code in (401, 403, 404):
        reason = f"the Hub has no repository {repo}, or it is private: set HF_TOKEN"
        raise ModelNotFound(reason + list_known(), param="model")
    if not response.is_success:
        reason = f"the Hub answers {response.status_code} for {repo}: try again later"
        raise ModelNotFound(reason, param="model")
    return response


def not_gguf(name: str) -> str:
    """The text of an error: `name` has only GGUF files, and what to take instead."""
    base = re.sub(r"[-.](gguf|i?q\d\w*)\b", "", name.rpartition("/")[2], flags=re.IGNORECASE)
    return f"GGUF is not served: take an MLX version, such as mlx-community/{base}-4bit"


def list_known() -> str:
    """The end of an error's text: the models on this machine."""
    names = sorted(cached_models())
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"; on this machine: {listed or 'none'}; `demo` always works, a folder by its full path"


def on_this_machine(model: str) -> bool:
    """Whether a name that every client may use is shipped, or in the Hub cache in part or whole."""
    return model in DEMOS or _repository(model)[0] in cached_models()


def cached_models() -> list[str]:
    """The repositories in the Hub cache, complete or not."""
    names = (path.name.removeprefix("models--") for path in cache_root().glob("models--*"))
    return [name.replace("--", "/") for name in names]


def cache_root() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE))


def checkpoint(model: str) -> Outline:
    """The outline of a model, here or on the Hub, without a download. Raises the errors of
    `folder_of`, and `BadRequest` for a config that cannot be read."""
    folder = local_folder(model)
    if folder is None:
        return outline(model)
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config, template = read_json(folder / "config.json"), ""
    with suppress(BadRequest):  # the load reports a template that cannot be read
        template = named_template(folder)
    return Outline(config, weights, template, here=True)


PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Without one of these files, a checkpoint cannot accept images."""


@dataclass(frozen=True)
class ModelFacts:
    """What a gateway can know of a model before its load. `None`: unknown."""

    context_length: int | None = None
    vision: bool | None = None
    reasoning: bool | None = None


def facts_of(model: str, registry: Callable[[], PluginRegistry]) -> ModelFacts:
    """By files on this machine only. `registry` is called only if they can be read."""
    try:
        folder = local_folder(model)
        if folder is None:
            return ModelFacts()
        config = read_json(folder / "config.json")
        template = named_template(folder)
    except MLXProviderError:
        return ModelFacts()
    return ModelFacts(
        context_length=named_context(text_fields(config)),
        vision="vision_config" in config and any((folder / name).is_file() for name in PROCESSORS),
        reasoning=registry().detect_reasoning_parser(template) is not None,
    )


@dataclass(frozen=True)
class OnDisk:
    name: str
    size: int  # bytes of all revisions
    fault: str = ""
    """Why it cannot be served. Empty: it can."""


def models_on_disk() -> list[OnDisk]:
    """All models in the Hub cache, by their names and sizes. Reads no weights. Raises `BadRequest`
    if the cache cannot be used."""
    from huggingface_hub import scan_cache_dir

    if not cache_root().is_dir() and (why := obstacle(cache_root())):
        raise BadRequest(f"the Hub cache {cache_root()} cannot be used: {why}")
    cache_root().mkdir(parents=True, exist_ok=True)
    scanned = {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir(cache_root()).repos}
    names = sorted(cached_models(), key=str.lower)
    sizes = (scanned[n] if n in scanned else _size(_repository_folder(n)) for n in names)
    return [OnDisk(name, size, _fault_of(name)) for name, size in zip(names, sizes, strict=True)]


def _fault_of(name: str) -> str:
    try:
        if local_folder(name, repository=True) is not None:
            return ""
    except (BadRequest, ModelNotFound) as error:
        return error.message
    files = [path.name for path in _repository_folder(name).glob("snapshots/*/*")]
    if any(name.endswith(GGUF) for name in files):
        return not_gguf(name)
    if any(name.endswith(".safetensors") for name in files) or not files:
        return f"incomplete: `mlx-provider pull {name}` fetches the rest"
    return "holds no weights for MLX"


def remove(model: str) -> int:
    """Remove a repository from the Hub cache. Returns the freed bytes. Raises `ModelNotFound`, and
    `BadRequest` for files that cannot be removed."""
    if model not in cached_models():
        raise ModelNotFound(f"{model} is not in the Hub cache{list_known()}", param="model")
    folder = _repository_folder(model)
    freed = _size(folder)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise BadRequest(f"{folder} cannot be removed: {error}", param="model") from error
    return freed


def _repository_folder(name: str) -> Path:
    return cache_root() / f"models--{name.replace('/', '--')}"


def _size(folder: Path) -> int:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum({(s.st_dev, s.st_ino): s.st_size for s in map(Path.stat, paths)}.values())
