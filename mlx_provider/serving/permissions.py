"""The permissions of the engine's owner: options per model, and the folders that others may name.

    origin    model                                     options
    owner     anything                                  all
    client    Hub ids; folders of the file or a root    all: the gateway's config set them
    remote    as client                                 all but `OWNER_ONLY`
    named     as client                                 `NAMED_KEYS`

The file is the owner's, in TOML: a table of `ModelOptions` per model, by its name in requests."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from ..errors import BadRequest, Forbidden, ModelNotFound
from ..protocol.requests import NAMED_KEYS, OWNER_ONLY, ModelOptions, ModelRequest
from ..safe_open import read_trusted
from .hub import DEMOS, cache_root

T = TypeVar("T", bound=ModelRequest)
LARGEST_FILE = 2**20
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w-][\w.-]*)?")
"""A Hub id. Parts that begin with a dot, such as `..`, do not match."""


class Permissions:
    """Applied once per request, before its model is examined. Safe from any thread."""

    def __init__(
        self, roots: Sequence[Path] = (), granted: Mapping[str, ModelOptions] = {}
    ) -> None:
        self._roots = tuple(roots)
        self._granted = granted

    def apply(self, request: T) -> T:
        """The request with the owner's options for its model. Raises `Forbidden` that names the
        option; `ModelNotFound` with one message for all folders that the sender may not name, so
        that it does not reveal which exist."""
        _refuse_options(request)
        if request.origin != "owner" and request.model not in self._granted:
            self._refuse_foreign_folder(request.model)
        granted = self._granted.get(request.model)
        if granted is None:
            return request
        media = sorted({*granted.allow_media, *request.options.allow_media})
        options = granted.model_copy(update={**_set_options(request.options), "allow_media": media})
        if request.remote and granted.context_length is not None:
            length = min(granted.context_length, options.context_length or granted.context_length)
            options = options.model_copy(update={"context_length": length})
        return request.model_copy(update={"options": options})

    def may_lengthen(self, request: ModelRequest) -> bool:
        """Whether its context may be longer than the model's own."""
        return not request.remote or self._granted_length(request) is not None

    def is_listed(self, request: ModelRequest) -> bool:
        """Whether others see its context length: not if a remote client chose it."""
        length = request.options.context_length
        return not request.remote or length in (None, self._granted_length(request))

    def _granted_length(self, request: ModelRequest) -> int | None:
        granted = self._granted.get(request.model)
        return None if granted is None else granted.context_length

    def _refuse_foreign_folder(self, model: str) -> None:
        if not (model in DEMOS or self._under_a_root(model) or REPOSITORY.fullmatch(model)):
            raise ModelNotFound(
                f"no model {model!r} is served here: name a Hub repository, or let the engine's "
                "owner list its folder (MLX_PROVIDER_MODEL_ROOTS)",
                param="model",
            )

    def _under_a_root(self, model: str) -> bool:
        """Whether it is a folder under a root, with links resolved. Only `/...` and `~/...` count:
        other forms would reveal data about the machine, and list a folder under several names."""
        if not model.startswith(("/", "~/")) or model != os.path.normpath(model):
            return False
        path = Path(os.path.realpath(Path(model).expanduser()))
        roots = (Path(os.path.realpath(root)) for root in (*self._roots, cache_root()))
        return any(path.is_relative_to(root) for root in roots) and (path / "config.json").is_file()


def names_repository(request: ModelRequest) -> bool:
    """Whether the model is a Hub id, and never a folder of that name."""
    return request.origin != "owner" and REPOSITORY.fullmatch(request.model) is not None


def tenant(request: ModelRequest) -> str:
    """Whose request it is, for the fair division of the device."""
    return request.namespace if request.tenant is None else request.tenant


def read_permissions(file: Path) -> dict[str, ModelOptions]:
    """The owner's options by model. Raises `BadRequest` that names file, model and option."""
    try:
        tables = tomllib.loads(read_trusted(file, LARGEST_FILE, closed_to=0o022).decode())
    except OSError as error:
        raise BadRequest(f"models file {file}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadRequest(f"models file {file}: {error}") from None
    return {name: _options(file, name, table) for name, table in tables.items()}


def _options(file: Path, name: str, table: object) -> ModelOptions:
    try:
        return ModelOptions.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = ".".join(map(str, first["loc"])) or "a table of options"
        raise BadRequest(f"models file {file}: {name!r}: {option}: {first['msg']}") from None


def _refuse_options(request: ModelRequest) -> None:
    chosen = set(_set_options(request.options))
    if request.origin == "named":
        refused, how = chosen - NAMED_KEYS, "with a named key"
    else:
        refused, how = chosen & OWNER_ONLY, "over the network"
    if refused and request.remote:  # also true of a named key
        name = min(refused)
        raise Forbidden(
            f"{name} cannot be set {how}: grant it where the engine runs, in its "
            "owner's models file (MLX_PROVIDER_MODELS_FILE)",
            param=f"options.{name}",
        )


def _set_options(options: ModelOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in options.model_dump(exclude_defaults=True)}
