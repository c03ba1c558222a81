"""`pytest --mlx-conformance NAME`: checks that anyone can run over an installed plugin.

A check is a function with one argument, its subject, and its docstring is the promise that it
checks. It raises `Nonconformity`, `NotApplicable`, or what the plugin raises. This module has the
checks of every plugin and makes pytest's items; `parsers` and `models` have the other checks."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ...isolation import Fault, attempt
from ...records import ModelFamily, ReasoningParser, ToolParser
from ...registry import Plugin, PluginRegistry
from ...registry.contents import Contents, load
from ...registry.discovery import find_plugins

S = TypeVar("S")  # the class of a check's subject
ODD_CONFIGS: Sequence[dict[str, object]] = (  # `config.json` of checkpoints of no family
    {},
    {"model_type": "an_architecture_that_nobody_has"},
    {"model_type": None, "architectures": None},
    {"model_type": 7, "text_config": [], "vision_config": "none"},
    {"text_config": {"model_type": "an_architecture_that_nobody_has"}, "vision_config": {}},
)


class Nonconformity(AssertionError):
    """A promise is not kept; the message says how."""


class NotApplicable(Exception):
    """A check does not apply; the message says why."""


def demand(kept: bool, summary: str) -> None:
    """Raise `Nonconformity` with `summary` unless the promise is `kept`."""
    if not kept:
        raise Nonconformity(summary)


def same(found: object, expected: object, what: str) -> None:
    """Raise `Nonconformity`, which begins with `what`, unless both values are equal."""
    demand(found == expected, f"{what}\n  expected: {expected!r:.600}\n  found:    {found!r:.600}")


@dataclass(frozen=True)
class Case:
    """One check of one subject. `run` raises what the check raises."""

    subject: str  # `plugin`, or kind and name of a record
    variant: str  # the label of a model's checkpoint; else empty
    check: str
    promise: str  # the docstring of the check
    run: Callable[[], None]


class Laboratory:
    """What the checks of one run share: the plugins, and folders that `close` deletes. `builders`:
    (name of a family) -> functions that write a checkpoint into an empty folder, by label."""

    def __init__(self, builders: Callable[[str], Mapping[str, Callable[[Path], object]]]) -> None:
        self.builders = builders
        self._folder = tempfile.TemporaryDirectory(prefix="mlxp-conformance-")
        self.close = self._folder.cleanup

    @cached_property
    def registry(self) -> PluginRegistry:
        return PluginRegistry.discover()

    def folder(self) -> Path:
        """A new, empty folder."""
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def write_folder(self, write: Callable[[Path], object]) -> Path:
        """A new folder that `write` has filled."""
        folder = self.folder()
        write(folder)
        return folder


@dataclass(frozen=True)
class Installed:
    """A plugin, as the subject of checks. `contents`: its records; `None`: it does not load."""

    plugin: Plugin
    contents: Contents | None


def loads(of: Installed) -> None:
    """It loads, its hooks run, and no name of it clashes with another's."""
    demand(of.plugin.error is None, f"it is skipped whole: {of.plugin.error}")
    demand(not of.plugin.notes, f"mlx-provider plugins notes: {'; '.join(of.plugin.notes)}")


def recognition(of: Installed) -> None:
    """`matches` and `detect` take any config and any template, and claim no unknown one."""
    if of.contents is None:
        return
    for family in of.contents.of(ModelFamily):
        for config in ODD_CONFIGS:
            same(family.matches(config), 0, f"family {family.name!r} claims {config}")
    for parser in chain[Any](of.contents.of(ToolParser), of.contents.of(ReasoningParser)):
        for template in ("", "{{ messages }}", "{% for message in messages %}{{ message }}"):
            found = parser.detect(template)
            demand(not found, f"parser {parser.name!r} claims the chat template {template!r}")


def checkpoint(name: str) -> None:
    """Its checks have a checkpoint to run on."""
    # fails always: a family without a checkpoint has this check in place of all others
    raise Nonconformity(
        f"there is no checkpoint for {name!r}: write one in the hook "
        "pytest_mlx_conformance_models of a conftest.py"
    )


PLUGIN_CHECKS = (loads, recognition)


def find(name: str) -> tuple[Plugin, EntryPoint]:
    """The installed plugin of a name, or `distribution:name`, and its entry point. Raises
    `pytest.UsageError` if there is none."""
    known = find_plugins()
    for plugin, point in known:
        if name in (plugin.name, plugin.key):
            return plugin, point
    names = ", ".join(sorted(plugin.name for plugin, _ in known)) or "none"
    raise pytest.UsageError(f"no plugin {name!r} is installed (installed: {names})")


def cases_of(plugin: Plugin, point: EntryPoint, lab: Laboratory) -> list[Case]:
    """Every check of an installed plugin: of itself, then of its parsers and model families."""
    loaded = attempt(lambda: load(point))
    contents = None if isinstance(loaded, Fault) else loaded
    # the registry's entry, which also says whether its names clash with those of other plugins
    listed = next((other for other in lab.registry.plugins if other.key == plugin.key), plugin)
    if isinstance(loaded, Fault):
        listed = replace(listed, error=loaded.summary)
    found = [*cases("plugin", "", PLUGIN_CHECKS, lambda: Installed(listed, contents))]
    if contents is not None:
        found += _of_parsers(contents)
    if contents is not None and contents.records[ModelFamily]:
        from . import models

        found += models.cases_of(contents.of(ModelFamily), lab)
    return found


def _of_parsers(contents: Contents) -> Iterator[Case]:
    from .parsers import REASONING_CHECKS, TOOL_CHECKS, Format, Thoughts

    reasoning = {parser.name: parser for parser in contents.of(ReasoningParser)}
    for tool_parser in contents.of(ToolParser):
        make_format = partial(Format, tool_parser, reasoning.get(tool_parser.name))
        yield from cases(f"tool parser {tool_parser.name}", "", TOOL_CHECKS, make_format)
    for name, parser in reasoning.items():
        make_thoughts = partial(Thoughts, parser)
        yield from cases(f"reasoning parser {name}", "", REASONING_CHECKS, make_thoughts)


def cases(
    subject: str, variant: str, checks: Iterable[Callable[[S], None]], made: Callable[[], S]
) -> Iterator[Case]:
    """One case per check. `made` makes the subject when a check runs, not when it is listed."""

    def run(check: Callable[[S], None]) -> None:
        check(made())

    for check in checks:
        name, promise = check.__name__.replace("_", " "), check.__doc__ or ""
        yield Case(subject, variant, name, promise, partial(run, check))


class ConformanceItem(pytest.Item):
    case: Case

    def runtest(self) -> None:
        try:
            self.case.run()
        except NotApplicable as reason:
            pytest.skip(str(reason))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """A `Nonconformity` in words; any other error with its traceback."""
        if isinstance(excinfo.value, Nonconformity):
            return f"promised: {' '.join(self.case.promise.split())}\nfound: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class Collecting:
    """The pytest plugin of a run with `--mlx-conformance`."""

    def __init__(self, config: pytest.Config, names: Sequence[str]) -> None:
        self._hook = config.hook
        self._plugins = [find(name) for name in names]
        self._lab = Laboratory(self._builders)

    def _builders(self, name: str) -> Mapping[str, Callable[[Path], object]]:
        found = self._hook.pytest_mlx_conformance_models(name=name)
        return {label: write for models in found for label, write in (models or {}).items()}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """Add the cases as items: first, so that options such as `-k` also select these."""
        for plugin, point in self._plugins:
            for case in cases_of(plugin, point, self._lab):
                name = " ".join(filter(None, (case.subject, case.variant, case.check)))
                name = name.replace("::", ":")
                node = f"{plugin.name}::{name}"
                item = ConformanceItem.from_parent(session, name=name, nodeid=node)
                item.case = case
                items.append(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._lab.close()
