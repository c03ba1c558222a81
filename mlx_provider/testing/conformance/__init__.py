"""`pytest --mlx-conformance NAME`: checks that anyone can run over an installed plugin.

`parsers` has those of formats, `models` of model families. A check is a function of its subject;
the docstring is its promise. It raises `Nonconformity`, `NotApplicable`, or what the plugin raises.
"""

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

S = TypeVar("S")
ODD_CONFIGS: Sequence[dict[str, object]] = (
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
    if not kept:
        raise Nonconformity(summary)


def same(found: object, expected: object, what: str) -> None:
    demand(found == expected, f"{what}\n  expected: {expected!r:.600}\n  found:    {found!r:.600}")


@dataclass(frozen=True)
class Case:
    subject: str
    """`plugin`, or kind and name of a record."""
    variant: str
    """Checkpoint and format of a model."""
    check: str
    promise: str
    run: Callable[[], None]


class Laboratory:
    """`builders`: (name of a family) -> functions that write a checkpoint into an empty folder, by
    label."""

    def __init__(self, builders: Callable[[str], Mapping[str, Callable[[Path], object]]]) -> None:
        self.builders = builders
        self._folder = tempfile.TemporaryDirectory(prefix="mlxp-conformance-")
        self.close = self._folder.cleanup

    @cached_property
    def registry(self) -> PluginRegistry:
        return PluginRegistry.discover()

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def write_folder(self, write: Callable[[Path], object]) -> Path:
        folder = self.folder()
        write(folder)
        return folder


@dataclass(frozen=True)
class Installed:
    plugin: Plugin
    contents: Contents | None
    """`None`: it does not load."""


def loads(of: Installed) -> None:
    """It loads, its hooks run, and no name of it clashes with another's."""
    demand(of.plugin.error is None, f"it is skipped whole: {of.plugin.error}")
    demand(not of.plugin.notes, f"mlx-provider plugins notes: {'; '.join(of.plugin.notes)}")


def recognition(of: Installed) -> None:
    """`matches` and `detect` take any config and any template, and claim none that is nobody's."""
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
    raise Nonconformity(
        f"there is no checkpoint for {name!r}: write one in the hook "
        "pytest_mlx_conformance_models of a conftest.py"
    )


PLUGIN_CHECKS = (loads, recognition)


def find(name: str) -> tuple[Plugin, EntryPoint]:
    """By name, or `distribution:name`. Raises `pytest.UsageError`."""
    for plugin, point in (known := find_plugins()):
        if name in (plugin.name, plugin.key):
            return plugin, point
    names = ", ".join(sorted(plugin.name for plugin, _ in known)) or "none"
    raise pytest.UsageError(f"no plugin {name!r} is installed (installed: {names})")


def cases_of(plugin: Plugin, point: EntryPoint, lab: Laboratory) -> list[Case]:
    loaded = attempt(lambda: load(point))
    contents = None if isinstance(loaded, Fault) else loaded
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

    whole = {parser.name: parser for parser in contents.of(ReasoningParser)}
    for calls in contents.of(ToolParser):
        made = partial(Format, calls, whole.get(calls.name))
        yield from cases(f"tool parser {calls.name}", "", TOOL_CHECKS, made)
    for name, parser in whole.items():
        thoughts = partial(Thoughts, parser)
        yield from cases(f"reasoning parser {name}", "", REASONING_CHECKS, thoughts)


def cases(
    subject: str, variant: str, checks: Iterable[Callable[[S], None]], made: Callable[[], S]
) -> Iterator[Case]:
    """Calls `made` when a check runs, not when it is listed."""

    for check in checks:
        yield Case(
            subject,
            variant,
            check.__name__.replace("_", " "),
            check.__doc__ or "",
            partial(lambda check: check(made()), check),
        )


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
        self._found = [find(name) for name in names]
        self._lab = Laboratory(self._builders)

    def _builders(self, name: str) -> Mapping[str, Callable[[Path], object]]:
        found = self._hook.pytest_mlx_conformance_models(name=name)
        return {label: write for models in found for label, write in (models or {}).items()}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """First, so that options such as `-k` also select these."""
        for plugin, point in self._found:
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
