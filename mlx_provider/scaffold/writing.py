"""Writes the files of a plugin from templates."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import __version__
from ..errors import BadRequest
from ..hookspecs import API_VERSION
from .kinds import Kind
from .naming import PluginName

TEMPLATES = Path(__file__).parent / "templates"
PACKAGE, SUFFIX = "package", ".jinja"


def write_plugin(name: PluginName, kind: Kind, parent: Path) -> list[Path]:
    """Write the folder of a new plugin below `parent`; returns its files.

    Raises `BadRequest` if the folder exists or cannot be made.
    """
    folder = parent / name.distribution
    texts = rendered(name, kind)
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise BadRequest(
            f"{folder} is there already: choose another name, or move it away", param="name"
        ) from None
    except OSError as error:
        raise BadRequest(f"{folder} cannot be made: {error.strerror}", param="name") from None
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return [folder / path for path in texts]


def rendered(name: PluginName, kind: Kind) -> dict[str, str]:
    """Text by path of each file of a plugin."""
    given = {
        "plugin": name,
        "kind": kind,
        "api": API_VERSION,
        "oldest": ".".join(__version__.split(".")[:2]),
    }
    found = {}
    for source in ("common", kind.option):
        folder = TEMPLATES / source
        environment = Environment(  # noqa: S701  # no HTML is written
            loader=FileSystemLoader([folder, TEMPLATES]),
            undefined=StrictUndefined,
            keep_trailing_newline=True,
        )
        for path in sorted(folder.rglob(f"*{SUFFIX}")):
            inside = path.relative_to(folder).as_posix()
            parts = inside.removesuffix(SUFFIX).split("/")
            target = "/".join(name.module if part == PACKAGE else part for part in parts)
            found[target] = environment.get_template(inside).render(given)
    return found
