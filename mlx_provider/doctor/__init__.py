"""Finds problems on this machine, with their remedies: `examine(Subject("OWNER/NAME"))`.

A check is a function from a `Subject` to `Finding`s. Checks change nothing on this machine, except
that `proxy.token` may start an engine. They use the network only for a model that is not here."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

from ..errors import MLXProviderError
from ..isolation import Fault, attempt
from . import versions
from .subject import STATES, Finding, Subject

__all__ = ["STATES", "Finding", "Subject", "examine", "healthy", "json_fields"]
FORMAT = 1
"""Version of `json_fields`; increases when keys change."""
IGNORE = "continue: no other check depends on this one; report it if it happens again"
SETTING = "correct the variable that is named, or unset it"
READABLE = "make the file or folder that is named readable for this user"
MODEL = "download or convert the model again, or name another"
FAMILY = "install a plugin that brings a family for it (hook mlx_model_families), or name another"
Checks = tuple[tuple[str, Callable[[Subject], Iterable[Finding]], str], ...]
"""Name, function, and the remedy if the function raises: its error becomes a finding that fails."""

PYTHON_CHECKS: Checks = (
    ("versions.packages", versions.check_packages, versions.REINSTALL),
    ("versions.backend", versions.check_backend, versions.REINSTALL),
)


def machine_checks() -> Checks:
    """Checks that need no model. Raises if a package that they import is missing or broken."""
    from . import machine

    return (
        ("settings", machine.check_settings, SETTING),
        ("memory.limit", machine.check_memory, SETTING),
        ("memory.wired", machine.check_wired_memory, IGNORE),
        ("runtime.folder", machine.check_runtime_folder, SETTING),
        ("disk.prefix_cache", machine.check_disk_tier, READABLE),
        ("config.file", machine.check_config_file, READABLE),
        ("plugins", machine.check_plugins, versions.REINSTALL),
        ("engine", machine.check_engine, f"correct what is named, or {machine.RESTART}"),
    )


def model_checks(*, thorough: bool = True) -> Checks:
    """Without a model, only `disk.models` finds anything. If the first one fails, none follows."""
    from . import machine, model

    checks: Checks = (
        ("model.found", model.check_location, "correct the name; `demo` always works"),
        ("disk.models", machine.check_download, IGNORE),
        ("model.files", model.check_files, MODEL),
        ("model.family", model.check_family, FAMILY),
        ("model.memory", model.check_memory, MODEL),
        ("model.formats", model.check_formats, MODEL),
        ("template.messages", model.check_messages, model.REMEDY_TEMPLATE),
        ("template.tools", model.check_tools, model.REMEDY_TEMPLATE),
        ("proxy.token", model.check_proxy, model.REMEDY_PROXY),
        ("speculation.head", model.check_draft_head, MODEL),
    )
    return checks if thorough else tuple(check for check in checks if check[0] != "proxy.token")


def examine(subject: Subject, *, thorough: bool = True) -> list[Finding]:
    """All findings, the worst first. `thorough`: also start a proxy and an engine for one token."""
    found = run(PYTHON_CHECKS, subject)
    checks = attempt(lambda: (machine_checks(), model_checks(thorough=thorough)))
    if isinstance(checks, Fault):
        summary = f"no other check can be made: {checks.summary}"
        return [*found, Finding("versions.imports", "fail", summary, versions.REINSTALL)]
    of_machine, (locate, *of_model) = checks
    located = run((locate,), subject)
    found += run(of_machine, subject) + located
    found += run(of_model, subject) if healthy(located) else []
    different: dict[str, Finding] = {}  # one cause may stop several checks with the same text
    for finding in sorted(found, key=lambda finding: STATES.index(finding.state)):
        different.setdefault(finding.what, finding)
    return list(different.values())


def run(checks: Iterable[tuple[str, Any, str]], subject: Subject) -> list[Finding]:
    """The findings of all checks. If a check raises, its error follows what it had found."""
    found: list[Finding] = []
    for name, check, remedy in checks:
        findings = chain.from_iterable(map(check, [subject]))  # runs nothing yet
        if (fault := attempt(partial(found.extend, findings))) is not None:
            error = fault.error
            summary = error.message if isinstance(error, MLXProviderError) else fault.summary
            found.append(Finding(name, "fail", summary, remedy))
    return found


def healthy(findings: Iterable[Finding]) -> bool:
    return all(finding.state != "fail" for finding in findings)


def json_fields(findings: Sequence[Finding], *, model: str | None, version: str) -> dict[str, Any]:
    """The report for programs. `model`: the model that was examined. `version`: ours."""
    return {
        "format": FORMAT,
        "version": version,
        "model": model,
        "healthy": healthy(findings),
        "findings": [asdict(finding) for finding in findings],
    }
