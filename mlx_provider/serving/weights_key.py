"""The options that need separate weights of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import wrong_option
from ..protocol.options import ModelOptions
from .hub import no_folder


@dataclass(frozen=True)
class WeightsKey:
    """Names and options that do not appear here share the weights."""

    folder: Path
    """With links resolved: a Hub id, a path and a link to it are the same."""
    adapter: Path | None
    trust_remote_code: bool
    modality: Literal["auto", "text"]
    dtype: str
    extra: str
    """JSON."""
    context_length: int | None = None
    """Only if longer than the model's own, for which a family may have to prepare."""

    @classmethod
    def of(cls, folder: Path, options: ModelOptions) -> WeightsKey:
        """Raises `BadRequest` if the adapter is not a folder."""
        return cls(
            folder.resolve(),
            _adapter(options),
            options.trust_remote_code,
            options.modality,
            options.dtype,
            options.model_dump_json(include={"extra"}),
        )


def _adapter(options: ModelOptions) -> Path | None:
    if not options.adapter:
        return None
    folder = Path(options.adapter).expanduser()
    if not folder.is_dir():
        raise wrong_option("adapter", no_folder(options.adapter))
    return folder.resolve()
