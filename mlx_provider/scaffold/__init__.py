"""Writes a new plugin, whose tests pass at once, from the Jinja2 files in `templates/common` and in
the folder of its kind. A folder `package` gets the name of the plugin's module."""

import re
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from .. import __version__
from ..errors import BadRequest
from ..hookspecs import API_VERSION
from ..registry import PluginRegistry, canonical, find_plugins

LONGEST = 40  # characters of a plugin's name
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_PREFIX = re.compile(r"mlx[-_]provider[-_]", re.IGNORECASE)
PACKAGE, SUFFIX = "package", ".jinja"
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Kind:
    option: str
    """Option of the command line without dashes, and folder of the template."""
    record: str
    """The kind of its record, as in `Plugin.records`."""
    about: str


KINDS = {
    kind.option: kind
    for kind in (
        Kind("family", "model family", "An architecture in mlx-lm's terms"),
        Kind("tool-parser", "tool parser", "How a model writes tool calls"),
        Kind("reasoning-parser", "reasoning parser", "How a model marks its thoughts"),
        Kind("drafter", "drafter", "A drafter, which guesses tokens"),
        Kind("kernels", "kernels", "A faster function for a device"),
    )
}


class PluginName:
    """A plugin's names. `name`: of the plugin and its record, such as `two_words`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module = f"mlx_provider_{name}"
        self.distribution = self.module.replace("_", "-")


def plugin_name(given: str, kind: Kind, registry: PluginRegistry) -> PluginName:
    """The names for what a user gives. Raises `BadRequest`, with the remedy, if `given` cannot be a
    name, or if an installed plugin or a record of this kind has it."""
    name = PluginName(_plain(given))
    for plugin, _ in find_plugins():
        same = canonical(plugin.name) == canonical(name.name)
        if same or canonical(plugin.distribution) == canonical(name.distribution):
            raise BadRequest(
                f"{name.name!r} is the name of an installed plugin, {plugin}: choose another name, "
                "or uninstall that one first",
                param="name",
            )
    for plugin in registry.plugins:
        for record in plugin.records.get(kind.record, ()):
            if canonical(record) == canonical(name.name):
                raise BadRequest(
                    f"{kind.record} {record!r} is installed already, by {plugin}: choose another "
                    "name; to replace that one on purpose, name the record in the code so",
                    param="name",
                )
    return name


def _plain(given: str) -> str:
    """`mlx-provider-two-words` as `two_words`. Raises `BadRequest`."""
    name = _PREFIX.sub("", given, count=1).replace("-", "_")
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        raise BadRequest(
            f"{given!r} cannot name a plugin: take small letters, digits and single hyphens, a "
            f"letter first, {LONGEST} at most, such as my-format",
            param="name",
        )
    return name


def write_plugin(name: PluginName, kind: Kind, parent: Path) -> list[Path]:
    """Write a plugin into a new folder in `parent`. Returns the paths of its files. Raises
    `BadRequest` if the folder exists or cannot be made."""
    folder = parent / name.distribution
    texts = render(name, kind)
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


def render(name: PluginName, kind: Kind) -> dict[str, str]:
    """The text of each file by its path below the plugin's folder."""
    oldest = ".".join(__version__.split(".")[:2])  # version of mlx-provider
    given = {"plugin": name, "kind": kind, "api": API_VERSION, "oldest": oldest}
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
