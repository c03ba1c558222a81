"""The checks as items of pytest, their results in the terminal, and the record."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import EntryPoint
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pytest

from ...registry import Plugin
from ...registry.conformance import CheckResult, ConformanceRecord, software, source_digest
from .cases import Laboratory, UnknownPlugin, cases_of, find
from .check import Case, Nonconformity, NotApplicable

PROPERTY = "mlx_conformance"
TITLE = "mlx conformance"


class ConformanceItem(pytest.Item):
    def __init__(self, *, plugin: Plugin, case: Case, **given: Any) -> None:
        super().__init__(**given)
        self.case = case
        self.user_properties.append(
            (PROPERTY, [plugin.key, case.subject, case.variant, case.check])
        )

    def runtest(self) -> None:
        try:
            self.case.run()
        except NotApplicable as reason:
            pytest.skip(str(reason))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """A `Nonconformity` in words; any other error with its traceback."""
        if isinstance(excinfo.value, Nonconformity):
            return f"promised: {self.case.promise}\nfound: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


class Suite:
    def __init__(self, plugin: Plugin, point: EntryPoint, lab: Laboratory) -> None:
        self.plugin = plugin
        self._point, self._lab = point, lab
        self.results: dict[tuple[str, ...], CheckResult] = {}

    @cached_property
    def cases(self) -> list[Case]:
        return cases_of(self.plugin, self._point, self._lab)

    def items(self, session: pytest.Session) -> list[ConformanceItem]:
        found = []
        for case in self.cases:
            parts = (self.plugin.name, case.subject, case.variant, case.check)
            name = " ".join(filter(None, parts[1:])).replace("::", ":")
            node = f"{self.plugin.name}::{name}"
            found.append(
                ConformanceItem.from_parent(
                    session, name=name, nodeid=node, plugin=self.plugin, case=case
                )
            )
        return found

    def take(self, result: CheckResult) -> None:
        self.results[result.subject, result.variant, result.check] = result

    @property
    def ordered(self) -> list[CheckResult]:
        keys = [(case.subject, case.variant, case.check) for case in self.cases]
        return [self.results[key] for key in keys if key in self.results]

    @property
    def missing(self) -> int:
        return len(self.cases) - len(self.ordered)

    def record(self) -> ConformanceRecord:
        return ConformanceRecord(
            plugin=self.plugin.name,
            distribution=self.plugin.distribution,
            version=self.plugin.version,
            software=software(),
            device=_device(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            source=source_digest(self.plugin),
            results=self.ordered,
        )


class Collecting:
    def __init__(self, config: pytest.Config, names: Sequence[str]) -> None:
        self._config = config
        self._lab = Laboratory(self._builders)
        self.suites: dict[str, Suite] = {}
        for name in names:
            try:
                plugin, point = find(name)
            except UnknownPlugin as error:
                raise pytest.UsageError(str(error)) from None
            self.suites[plugin.key] = Suite(plugin, point, self._lab)
        self._summaries: list[str] = []

    def _builders(self, name: str) -> Mapping[str, Callable[[Path], object]]:
        found: dict[str, Callable[[Path], object]] = {}
        for each in self._config.hook.pytest_mlx_conformance_models(name=name):
            found |= each or {}
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """First, so that options such as `-k` also select these."""
        for suite in self.suites.values():
            items += suite.items(session)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = dict(report.user_properties).get(PROPERTY)
        if key is None or (report.when != "call" and report.passed):
            return
        reason = "" if report.passed else _reason(report)
        plugin, subject, variant, check = cast("list[str]", key)
        self.suites[plugin].take(CheckResult(subject, variant, check, report.outcome, reason))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write a record for each plugin if all of its checks ran."""
        self._lab.close()
        if hasattr(session.config, "workerinput"):  # the controller of several processes keeps it
            return
        self._summaries = [self._kept(suite) for suite in self.suites.values()]

    def _kept(self, suite: Suite) -> str:
        if suite.missing:
            return f"no record is kept: {suite.missing} of {len(suite.cases)} checks did not run"
        try:
            return f"record: {suite.record().write()}"
        except OSError as error:
            return f"no record can be kept: {error}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for suite, summary in zip(self.suites.values(), self._summaries, strict=False):
            terminalreporter.section(f"{TITLE}: {suite.plugin}")
            for line in table(suite.ordered):
                failed = "FAILED" in line
                terminalreporter.write_line(line, red=failed, green=not failed)
            terminalreporter.write_line(summary)


def table(results: Iterable[CheckResult]) -> list[str]:
    groups = [
        (" ".join(filter(None, [subject, variant and f"[{variant}]"])), list(each))
        for (subject, variant), each in groupby(results, key=lambda r: (r.subject, r.variant))
    ]
    width = max((len(name) for name, _ in groups), default=0)
    return [f"  {name:<{width}}  {_line(each)}" for name, each in groups]


def _line(results: Sequence[CheckResult]) -> str:
    by = {
        outcome: [each for each in results if each.outcome == outcome]
        for outcome in ("passed", "failed", "skipped")
    }
    parts = [f"{len(by['passed'])} passed"]
    if by["failed"]:
        parts.append("FAILED: " + ", ".join(each.check for each in by["failed"]))
    reasons: dict[str, list[str]] = {}
    for each in by["skipped"]:
        reasons.setdefault(each.told, []).append(each.check)
    parts += [f"skipped: {', '.join(names)} ({why})" for why, names in reasons.items()]
    return "; ".join(parts)


def _reason(report: pytest.TestReport) -> str:
    found = report.longrepr
    if isinstance(found, tuple):
        return str(found[2]).removeprefix("Skipped: ")
    crash = getattr(found, "reprcrash", None)
    text = str(found) if crash is None else str(crash.message)
    return text[text.find("\nfound: ") + 1 :].removeprefix("found: ")[:2000]


def _device() -> str:
    from ...serving.kernels import device_kind

    return device_kind()
