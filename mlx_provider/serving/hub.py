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
REACH = 0.8
"""Seconds until the Hub counts as unreachable."""
GGUF = ".gguf"
TEMPLATE = "chat_template.jinja"
TEMPLATES = ("chat_template.json", "tokenizer_config.json")
PATTERNS = ["*.json", "*.safetensors", "*.py", "*.model", "*.tiktoken", "*.txt", "*.jinja"]


def folder_of(model: str, *, repository: bool = False) -> Path:
    """The folder of `model`: one of `DEMOS`, a path, or a repository `owner/name[@revision]`, which
    is downloaded if missing. `repository`: only that. Raises `ModelNotFound` with a list of local
    models, in under a second if the Hub is unreachable; `BadRequest` for a folder without a model.
    """
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
        return _of_files(path)
    if not is_repository(model):
        raise ModelNotFound(no_folder(model) + list_known(), param="model")
    return _cached_folder(*_repository(model))


def full_name(model: str) -> str:
    """A folder as its absolute path, because an engine has another working folder."""
    model = model.removeprefix("mlx/")
    if model in DEMOS or not _path(model).is_dir():
        return model
    return os.fspath(_path(model).resolve())


def no_folder(name: str) -> str:
    path = _path(name)
    if path.is_absolute():
        return f"no folder {path} on the engine's machine"
    return (
        f"no folder {name!r} on the engine's machine ({Path.cwd() / path} does not exist): "
        "give the full path of a folder"
    )


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
    chat_template: str = ""
    """Empty: none, or several by name."""
    here: bool = False


def outline(model: str) -> Outline:
    """From small responses that are not stored. Raises `ModelNotFound`, in under a second if the
    Hub is unreachable."""
    repo, revision = _repository(model)
    files = _list_files(repo, revision)
    read = partial(_answer, repo, f"{repo}/resolve/{revision or 'main'}")
    weights = sum(size for name, size in files.items() if _is_weights(name))
    config = _object(repo, read("config.json"))
    if TEMPLATE in files:
        return Outline(config, weights, read(TEMPLATE).text)
    named = [_object(repo, read(name)).get("chat_template") for name in TEMPLATES if name in files]
    return Outline(config, weights, next((text for text in named if isinstance(text, str)), ""))


def _list_files(repo: str, revision: str | None) -> dict[str, int]:
    """Bytes by name. Raises `ModelNotFound`, and `BadRequest` without weights for MLX."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        reason = f"{repo} is not on this machine, and HF_HUB_OFFLINE is set"
        raise ModelNotFound(reason + list_known())
    listed = _answer(repo, f"api/models/{repo}/revision", f"{revision or 'main'}?blobs=true")
    siblings = _object(repo, listed).get("siblings", ())
    files = {file.get("rfilename", ""): file.get("size") or 0 for file in siblings}
    if any(name.endswith(GGUF) for name in files) and not any(map(_is_weights, files)):
        raise BadRequest(f"{repo}: {not_gguf(repo)}", param="model")
    return files


def _object(repo: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        content = from_json(answer.content)
    except ValueError as error:
        raise BadRequest(f"{repo}: {answer.url.path}: {error}", param="model") from None
    if not isinstance(content, dict):
        raise BadRequest(f"{repo}: {answer.url.path} holds no JSON object", param="model")
    return content


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and name != "consolidated.safetensors"


def _of_files(folder: Path) -> Path:
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

    try:
        folder = Path(
            snapshot_download(
                repo, revision=revision, local_files_only=True, allow_patterns=PATTERNS
            )
        )
    except HFValidationError as error:
        raise ModelNotFound(f"{repo!r} is no repository name: {error}", param="model") from error
    except LocalEntryNotFoundError:
        return None
    complete = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return _of_files(folder) if complete else None


def download(model: str) -> Path:
    """Fetch the newest version, only new files. Raises `ModelNotFound`, and `BadRequest` for a
    repository without weights for MLX."""
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


def _answer(repo: str, path: str, name: str) -> httpx.Response:
    import httpx
    from huggingface_hub import constants, get_token

    try:
        token = get_token()
    except OSError:  # a file that this user cannot read
        token = None
    headers = {"authorization": f"Bearer {token}"} if token else {}
    address = f"{constants.ENDPOINT}/{path}/{name}"
    try:
        answer = httpx.get(address, headers=headers, timeout=REACH, follow_redirects=True)
    except httpx.HTTPError as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ModelNotFound(
            f"{repo} is not on this machine, and the Hub is out of reach ({reason}){list_known()}",
            param="model",
        ) from error
    if answer.status_code in (401, 403, 404):
        reason = f"the Hub has no repository {repo}, or it is private: set HF_TOKEN"
        raise ModelNotFound(reason + list_known(), param="model")
    if not answer.is_success:
        reason = f"the Hub answers {answer.status_code} for {repo}: try again later"
        raise ModelNotFound(reason, param="model")
    return answer


def not_gguf(name: str) -> str:
    base = re.sub(r"[-.](gguf|i?q\d\w*)\b", "", name.rpartition("/")[2], flags=re.IGNORECASE)
    return f"GGUF is not served: take an MLX version, such as mlx-community/{base}-4bit"


def list_known() -> str:
    names = sorted(cached_models())
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"; on this machine: {listed or 'none'}; `demo` always works, a folder by its full path"


def on_this_machine(model: str) -> bool:
    """Whether a name that every client may use needs no download."""
    return model in DEMOS or _repository(model)[0] in cached_models()


def cached_models() -> list[str]:
    return [
        p.name.removeprefix("models--").replace("--", "/") for p in cache_root().glob("models--*")
    ]


def cache_root() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("HF_HUB_CACHE", constants.HF_HUB_CACHE))


def checkpoint(model: str) -> Outline:
    """Raises the errors of `folder_of`, and `BadRequest` for a config that cannot be read."""
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
    """`None`: unknown."""

    context_length: int | None = None
    vision: bool | None = None
    reasoning: bool | None = None


def facts_of(model: str, registry: Callable[[], PluginRegistry]) -> ModelFacts:
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
    size: int
    """Bytes of all revisions."""
    fault: str = ""


def models_on_disk() -> list[OnDisk]:
    """Reads names and sizes, no weights."""
    from huggingface_hub import scan_cache_dir

    if not cache_root().is_dir() and (why := obstacle(cache_root())):
        raise BadRequest(f"the Hub cache {cache_root()} cannot be used: {why}")
    cache_root().mkdir(parents=True, exist_ok=True)
    sizes = {repo.repo_id: repo.size_on_disk for repo in scan_cache_dir(cache_root()).repos}
    return [
        OnDisk(
            name,
            sizes[name] if name in sizes else _size(_repository_folder(name)),
            _fault_of_repository(name),
        )
        for name in sorted(cached_models(), key=str.lower)
    ]


def _fault_of_repository(name: str) -> str:
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
