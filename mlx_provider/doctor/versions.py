"""Compares Python, the system and our dependencies with the tested ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..upstream.blas import require_mlx
from .findings import Finding
from .subject import Subject

UPGRADE = "pip install --upgrade mlx-provider, into an environment of its own"


@dataclass(frozen=True)
class Tested:
    """Allowed versions of a package, and those of the test suite."""

    package: str
    allowed: str
    newest: str
    """The newest tested series."""


TESTED = (
    Tested("mlx", ">=0.32.4", "0.32"),
    Tested("mlx-lm", ">=0.32.2,<0.33", "0.32"),
    Tested("mlx-vlm", ">=0.7.10,<0.8", "0.7"),
    Tested("litellm", ">=1.106.2,!=1.107.0.*", "1.110"),
    Tested("transformers", ">=5.14,<6", "5.23"),
)


@dataclass(frozen=True)
class KnownBad:
    package: str
    versions: str
    why: str
    remedy: str


KNOWN_BAD = (
    KnownBad(
        "litellm",
        "==1.107.0.*",
        "a malicious upload of 21 October 2026, which may have read this machine's secrets",
        "pip install 'litellm!=1.107.0.*', then replace every key that this machine has held",
    ),
    KnownBad(
        "litellm",
        "<1.95",
        "an OpenAI model's name lets a request pass by its custom provider, and usage is lost",
        "pip install --upgrade litellm",
    ),
    KnownBad(
        "transformers",
        "==5.13.*",
        "mlx-lm cannot be imported beside it",
        "pip install 'transformers>=5.14,<6'",
    ),
    KnownBad(
        "huggingface-hub",
        ">=2",
        "litellm does not run beside it",
        "pip install 'huggingface-hub<2'",
    ),
)
PYTHONS = ("3.11", "3.14")
MACOS, GLIBC = "14", "2.35"
"""Oldest systems with wheels of MLX (mlx 0.32.4)."""


def python(subject: Subject) -> Iterator[Finding]:
    system = subject.system
    series = ".".join(system.python.split(".")[:2])
    oldest, newest = map(Version, PYTHONS)
    summary = f"Python {system.python}"
    if oldest <= Version(series) <= newest:
        yield Finding("versions.python", "ok", summary)
    else:
        remedy = f"use Python {oldest} to {newest}"
        yield Finding("versions.python", "fail", f"{summary} was never tested", remedy)
    if system.is_mac and system.machine != "arm64":
        yield Finding(
            "versions.machine",
            "fail",
            f"this Python is made for {system.machine}: MLX needs Apple silicon and a native one",
            "install an arm64 Python (an Intel Mac cannot run MLX)",
        )


def operating_system(subject: Subject) -> Iterator[Finding]:
    system = subject.system
    oldest = {"Darwin": MACOS, "Linux": GLIBC}.get(system.system)
    named = {"Darwin": "macOS", "Linux": "glibc"}.get(system.system, system.system)
    if oldest is None:
        summary = f"MLX has no packages for {named}"
        yield Finding("versions.system", "fail", summary, "use macOS 14 or newer, or Linux")
    elif not system.release:
        yield Finding("versions.system", "note", f"the version of {named} cannot be told")
    elif Version(system.release) < Version(oldest):
        yield Finding(
            "versions.system",
            "fail",
            f"{named} {system.release} is older than {oldest}, for which MLX has packages",
            f"update to {named} {oldest} or newer",
        )
    else:
        yield Finding("versions.system", "ok", f"{named} {system.release}, {system.machine}")


def packages(subject: Subject) -> Iterator[Finding]:
    for tested in TESTED:
        yield _judged(tested, subject.installed(tested.package))


def known_bad(subject: Subject) -> Iterator[Finding]:
    for bad in KNOWN_BAD:
        found = subject.installed(bad.package)
        if found and SpecifierSet(bad.versions, prereleases=True).contains(found):
            name = f"known_bad.{bad.package}"
            yield Finding(name, "fail", f"{bad.package} {found}: {bad.why}", bad.remedy)


def backend(subject: Subject) -> Iterator[Finding]:
    require_mlx()
    import mlx.core as mx

    both = [name for name in ("mlx-cpu", "mlx-cuda-13") if subject.installed(name)]
    if len(both) > 1:
        yield Finding(
            "versions.backend",
            "fail",
            "mlx-cpu and mlx-cuda-13 are both installed, and overwrite each other's library",
            "pip uninstall both, then install one of mlx-provider[cpu] and mlx-provider[cuda13]",
        )
        return
    device = mx.device_info().get("device_name") or mx.default_device()
    yield Finding("versions.backend", "ok", f"MLX runs on {device}")


def _judged(tested: Tested, found: str | None) -> Finding:
    name = f"versions.{tested.package}"
    if not found:
        return Finding(name, "fail", f"{tested.package} is not installed", UPGRADE)
    if not SpecifierSet(tested.allowed, prereleases=True).contains(found):
        summary = f"{tested.package} {found} is not {tested.allowed}"
        wanted = f"pip install '{tested.package}{tested.allowed}'"
        return Finding(name, "fail", summary, wanted)
    series = len(tested.newest.split("."))
    if Version(found).release[:series] > Version(tested.newest).release:
        summary = (
            f"{tested.package} {found} is newer than {tested.newest}, the newest that was tested"
        )
        return Finding(name, "note", summary, f"if something breaks, go back to {tested.newest}")
    return Finding(name, "ok", f"{tested.package} {found}")
