"""Random models in the formats that a comparison measures."""

from pathlib import Path

from mlx_provider.errors import BadRequest
from quantised import quantise
from random_weights import write_model
from tiny import family_named

FORMATS = ("float32", "bfloat16", "4bit")
"""`4bit`: quantised in groups of `GROUP`, the rest in bfloat16."""
GROUP = 64


def write_format(folder: Path, family: str, form: str, hidden: int, layers: int) -> Path:
    """A model of random weights in one of `FORMATS`. Raises `BadRequest` for what cannot be
    written."""
    refuse_unknown(family, form)
    if form != "4bit":
        return write_model(folder, family, form, hidden, layers)
    path = write_model(folder, family, "bfloat16", hidden, layers)
    return quantise(path, family, group=GROUP)


def refuse_unknown(family: str, form: str) -> None:
    """Raise `BadRequest` for an unknown format or family."""
    if form not in FORMATS:
        raise BadRequest(f"no such format: {form}; {', '.join(FORMATS)}", param="format")
    try:
        family_named(family)
    except ValueError as error:
        raise BadRequest(str(error), param="family") from None
