"""The model that is asked about: a folder, its `config.json` alone, or a name on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelNotFound
from ..families.checkpoint import named_context, read_json
from ..families.config_sizes import check_sizes
from ..families.estimate import Fields, named_dtype, text_fields
from ..serving.checkpoint import checkpoint
from ..serving.hub import local_folder
from ..serving.weight_files import stored_tensors
from ..upstream.without_weights import described

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Subject:
    """What is known of a model before its weights are there."""

    name: str
    config: Mapping[str, Any]
    stored: tuple[str, ...] = ()
    """Names of the tensors in its files; empty: the files are not here."""

    @property
    def text(self) -> Fields:
        return text_fields(self.config)

    @property
    def dtype(self) -> str:
        named = named_dtype(self.config)
        return named if named in DTYPES else DTYPES[0]

    @property
    def context(self) -> int | None:
        """The longest that the config names."""
        return named_context(self.text)

    def model(self) -> Any:
        """Its class's model, of which no array is computed.

        Raises `UnsupportedModel`, also for more layers than can be.
        """
        check_sizes(self.config)
        return described(self.config, dtype=self.dtype, stored=self.stored)


def subject(model: str) -> Subject:
    """Raises `ModelNotFound` and `BadRequest` as `checkpoint` does, and for a missing file."""
    model = model.removeprefix("mlx/")
    path = Path(model).expanduser()
    if path.suffix == ".json":
        if not path.is_file():
            raise ModelNotFound(f"there is no file {model}", param="model")
        return Subject(model, read_json(path))
    found = checkpoint(model)
    folder = local_folder(model)
    return Subject(model, found.config, tuple(stored_tensors(folder)) if folder else ())
