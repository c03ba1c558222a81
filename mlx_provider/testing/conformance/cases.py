"""All checks of one installed plugin."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, cached_property, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TypeVar

from ...isolation import Isolation
from ...records import Drafter, Kernels, ModelFamily, ReasoningParser, ToolParser
from ...registry import Plugin, PluginRegistry
from ...registry.contents import Contents, load
from ...registry.discovery import installed
from ..byte_model import ByteModel, byte_model
from . import loading, reasoning_parsers, tool_parsers
from .check import Case, Check, Nonconformity
from .loading import Installed
from .tool_parsers import Format

S = TypeVar("S")
CHECKPOINT = "Its checks have a checkpoint to run on."
Builders = Callable[[str], Mapping[str, Callable[[Path], object]]]
"""(name of a family, kernels or drafter) -> functions that write a tiny checkpoint into an empty
folder, by label."""


class UnknownPlugin(LookupError):
    """No such plugin is installed; the message says which are."""


class Laboratory:
    def __init__(self, builders: Builders) -> None:
        self.builders = builders
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def registry(self) -> PluginRegistry:
        return PluginRegistry.discover()

    @cached_property
    def writer(self) -> ByteModel:
        return byte_model()

    def folder(self) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="mlxp-conformance-")
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def find(name: str) -> tuple[Plugin, EntryPoint]:
    """By name, or `distribution:name`. Raises `UnknownPlugin`."""
    known = installed()
    for plugin, point in known:
        if name in (plugin.name, plugin.key):
            return plugin, point
    names = ", ".join(sorted(plugin.name for plugin, _ in known)) or "none"
    raise UnknownPlugin(f"no plugin {name!r} is installed (installed: {names})")


def cases_of(plugin: Plugin, point: EntryPoint, lab: Laboratory) -> list[Case]:
    contents: Contents | None = None
    with Isolation() as trying:
        contents = load(point)
    listed = next((each for each in lab.registry.plugins if each.key == plugin.key), plugin)
    if trying.fault is not None:
        listed = Plugin(
            plugin.name, plugin.distribution, plugin.version, error=trying.fault.summary
        )
    found = list(_each("plugin", "", loading.CHECKS, lambda: Installed(listed, point, contents)))
    if contents is not None:
        found += _of_records(contents, lab)
    return found


def _of_records(contents: Contents, lab: Laboratory) -> Iterator[Case]:
    whole = {parser.name: parser for parser in contents.reasoning_parsers}
    for family in contents.model_families:
        yield from _of_family(family, lab)
    for calls in contents.tool_parsers:
        made = partial(_format, calls, whole.get(calls.name), lab)
        yield from _each(f"tool parser {calls.name}", "", tool_parsers.CHECKS, made)
    for parser in contents.reasoning_parsers:
        subject = f"reasoning parser {parser.name}"
        yield from _each(subject, "", reasoning_parsers.CHECKS, partial(_itself, parser))
    for drafter in contents.drafters:
        yield from _of_drafter(drafter, lab)
    for kernels in contents.kernels:
        yield from _of_kernels(kernels, lab)


def _of_family(family: ModelFamily, lab: Laboratory) -> Iterator[Case]:
    from .families import CHECKS, ONCE
    from .specimens import FORMATS, Checkpoint, known_checkpoints

    subject = f"model family {family.name}"
    writers = lab.builders(family.name) or known_checkpoints(family, lab.registry)
    if not writers:
        yield Case(subject, "", "checkpoint", CHECKPOINT, partial(_no_checkpoint, family.name))
    for label, write in writers.items():
        checkpoint = Checkpoint(family, label, write, lab.registry, lab.folder)
        for kept_in in FORMATS:
            checks = (*CHECKS, *ONCE) if kept_in == FORMATS[0] else CHECKS
            made = partial(checkpoint.specimen, kept_in)
            yield from _each(subject, f"{label}, {kept_in}", checks, made)


def _of_drafter(drafter: Drafter, lab: Laboratory) -> Iterator[Case]:
    from .drafters import CHECKS, Guessing

    writers = lab.builders(drafter.name)
    made = cache(partial(Guessing, drafter, writers, lab.registry, lab.folder))
    yield from _each(f"drafter {drafter.name}", "", CHECKS, made)


def _of_kernels(kernels: Kernels, lab: Laboratory) -> Iterator[Case]:
    from .kernels import CHECKS, ONCE, Computing, known_models
    from .specimens import FORMATS

    subject = f"kernels {kernels.name}"
    writers = lab.builders(kernels.name) or known_models()
    for label, write in writers.items():
        for kept_in in FORMATS[:2]:
            made = partial(Computing, kernels, label, kept_in, write, lab.registry, lab.folder)
            yield from _each(subject, f"{label}, {kept_in}", CHECKS, made)
    yield from _each(subject, "", ONCE, made)


def _no_checkpoint(name: str) -> None:
    raise Nonconformity(
        f"there is no tiny checkpoint for {name!r}: write one in the hook "
        "pytest_mlx_conformance_models of a conftest.py"
    )


def _each(
    subject: str, variant: str, checks: Iterable[Check[S]], made: Callable[[], S]
) -> Iterator[Case]:
    """Calls `made` when a check runs, not when it is listed."""
    for check in checks:
        run = partial(_run, check, made)
        yield Case(subject, variant, check.name, check.promise, run)


def _run(check: Check[S], made: Callable[[], S]) -> None:
    check.run(made())


def _format(parser: ToolParser, thoughts: ReasoningParser | None, lab: Laboratory) -> Format:
    return Format(parser, thoughts, lab.writer)


def _itself(parser: ReasoningParser) -> ReasoningParser:
    return parser
