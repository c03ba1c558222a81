"""All checks, in order. An error of a check is a finding, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import MLXProviderError
from ..isolation import Isolation
from . import versions
from .findings import Finding
from .subject import Subject

REINSTALL = "install mlx-provider anew, into an environment of its own"
IGNORE = "go on: nothing else depends on this check; report it if it lasts"
SETTING = "correct the variable that is named, or unset it"
READABLE = "make the file or folder that is named readable for this user"
MODEL = "download or convert the model again, or name another"
FOUND = "model.found"
"""Without it, no other check of the model runs."""


@dataclass(frozen=True)
class Check:
    name: str
    look: Callable[[Subject], Iterable[Finding]]
    """Changes nothing. May raise anything."""
    remedy: str
    """Of a check that raises; the error becomes the summary."""
    of_model: bool = False
    thorough: bool = False


PYTHON_CHECKS = (
    Check("versions.python", versions.python, REINSTALL),
    Check("versions.system", versions.operating_system, IGNORE),
    Check("versions.packages", versions.packages, REINSTALL),
    Check("known_bad", versions.known_bad, REINSTALL),
    Check("versions.backend", versions.backend, REINSTALL),
)
"""These need only Python, and explain why the others cannot be imported."""


def engine_checks() -> tuple[Check, ...]:
    from . import checkpoint, clients, config_file, engine, machine, one_token, speed, template

    family = "install a plugin that brings a family for it (hook mlx_model_families), or take "
    of_machine = (
        Check("settings", machine.settings, SETTING),
        Check("memory.limit", machine.memory, SETTING),
        Check("memory.wired", machine.wired, IGNORE),
        Check("runtime.folder", machine.runtime_folder, SETTING),
        Check("disk.prefix_cache", machine.disk_tier, READABLE),
        Check("settings.models_file", machine.owners_file, SETTING),
        Check("config.file", config_file.config_file, READABLE),
        Check("plugins", machine.plugins, REINSTALL),
        Check("engine", engine.running, f"correct what is named, or {engine.RESTART}"),
        Check("clients", clients.configured, READABLE),
        Check("clients.keys", clients.keys, IGNORE),
        Check("clients.web_proxy", clients.web_proxies, IGNORE),
    )
    of_model = (
        Check(FOUND, checkpoint.found, "correct the name; `demo` always works", of_model=True),
        Check("model.files", checkpoint.files, MODEL, of_model=True),
        Check("model.family", checkpoint.family, f"{family}another", of_model=True),
        Check("disk.models", machine.download, IGNORE),
        Check("model.memory", checkpoint.memory, MODEL, of_model=True),
        Check("model.formats", checkpoint.parsers, MODEL, of_model=True),
        *(
            Check(f"template.{look.__name__}", look, template.OTHER, of_model=True)
            for look in template.CHECKS
        ),
        Check("proxy.token", one_token.token, one_token.LOGS, of_model=True, thorough=True),
        Check("measured.decoding", speed.decoding, SETTING, of_model=True),
        Check("speculation.head", speed.head, MODEL, of_model=True),
        Check("speculation.gain", speed.gain, SETTING, of_model=True),
    )
    return of_machine + of_model


def examine(subject: Subject, *, thorough: bool = True) -> list[Finding]:
    """`thorough`: also start a proxy and an engine for one token. Changes no settings, and only
    files of the engine that it may start."""
    found: list[Finding] = []
    for check in PYTHON_CHECKS:
        found += run(check, subject)
    with Isolation() as importing:
        checks = engine_checks()  # their imports can be broken
    if importing.fault is not None:
        summary = f"no other check can be made: {importing.fault.summary}"
        return [*found, Finding("versions.imports", "fail", summary, REINSTALL)]
    for check in checks:
        if _is_due(check, subject, found, thorough=thorough):
            known = {each.what for each in found}  # one cause may stop several checks
            found += [each for each in run(check, subject) if each.what not in known]
    return found


def run(check: Check, subject: Subject) -> Iterator[Finding]:
    with Isolation(generator=True) as trying:
        yield from check.look(subject)
    if trying.fault is not None:
        error = trying.fault.error
        summary = error.message if isinstance(error, MLXProviderError) else trying.fault.summary
        yield Finding(check.name, "fail", summary, check.remedy)


def _is_due(check: Check, subject: Subject, found: Sequence[Finding], *, thorough: bool) -> bool:
    """Checks of the model are not due if it was not found."""
    if check.thorough and not thorough:
        return False
    lost = any(each.name == FOUND and each.state == "fail" for each in found)
    return not check.of_model or (subject.model is not None and not lost)
