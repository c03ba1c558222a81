"""All checks, in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..isolation import Isolation
from . import base_checks
from .checks import Check, run
from .findings import Finding
from .subject import Subject

MODEL = "model.found"
"""The check without which nothing more is asked of a model."""


def examine(subject: Subject, *, thorough: bool = True) -> list[Finding]:
    """All findings about this machine, and about a model if the subject names one.

    `thorough`: also start a proxy and an engine for one token. Changes no settings, and only files
    of the engine that it may start. Errors of a check are findings.
    """
    found: list[Finding] = []
    for check in base_checks.CHECKS:
        found += run(check, subject)
    with Isolation() as importing:
        from .mlx_checks import CHECKS  # its imports can be broken
    if importing.fault is not None:
        summary = f"no other check can be made: {importing.fault.summary}"
        return [*found, Finding("versions.imports", "fail", summary, base_checks.REINSTALL)]
    for check in CHECKS:
        if _is_due(check, subject, found, thorough=thorough):
            found += _news(found, run(check, subject))
    return found


def _is_due(check: Check, subject: Subject, found: Sequence[Finding], *, thorough: bool) -> bool:
    """If a model was not found, no check of the model is due."""
    if check.thorough and not thorough:
        return False
    lost = any(each.name == MODEL and each.state == "fail" for each in found)
    return not check.of_model or (subject.model is not None and not lost)


def _news(found: Sequence[Finding], more: Iterable[Finding]) -> list[Finding]:
    """Without failures that were already found: one cause may stop several checks."""
    known = {each.what for each in found if each.state == "fail"}
    return [each for each in more if each.state != "fail" or each.what not in known]
