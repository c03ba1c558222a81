"""Compares our dependencies with the tested versions."""

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..upstream.runtime import require_mlx
from .subject import Finding, Subject

REINSTALL = "install mlx-provider anew from its clone, into an environment of its own"


@dataclass(frozen=True)
class Tested:
    package: str
    allowed: str
    newest_series: str
    """The first numbers of the newest version that the test suite ran with."""


TESTED = (
    Tested("mlx", ">=0.32.4", "0.32"),
    Tested("mlx-lm", ">=0.32.2,<0.33", "0.32"),
    Tested("mlx-vlm", ">=0.7.10,<0.8", "0.7"),
    Tested("litellm", ">=1.106.2,!=1.107.0.*", "1.110"),
    Tested("transformers", ">=5.14,<6", "5.23"),
)
MALICIOUS = "1.107.0"  # of litellm
CLEAN = "pip install 'litellm!=1.107.0.*', then replace every key that this machine has held"
ONE_BACKEND = "pip uninstall both, then install the extra cpu or cuda13 of mlx-provider"


def check_packages(subject: Subject) -> Iterator[Finding]:
    for tested in TESTED:
        yield _compare(tested, subject.installed(tested.package))


def check_backend(subject: Subject) -> Iterator[Finding]:
    """Whether one backend of MLX is installed and works. Raises the errors of importing MLX."""
    require_mlx()
    import mlx.core as mx

    backends = [name for name in ("mlx-cpu", "mlx-cuda-13") if subject.installed(name)]
    if len(backends) > 1:
        summary = f"{' and '.join(backends)} are both installed, and overwrite each other's library"
        yield Finding("versions.backend", "fail", summary, ONE_BACKEND)
        return
    device = mx.device_info().get("device_name") or mx.default_device()
    yield Finding("versions.backend", "ok", f"MLX runs on {device}")


def _compare(tested: Tested, found: str | None) -> Finding:
    name = f"versions.{tested.package}"
    if not found:
        return Finding(name, "fail", f"{tested.package} is not installed", REINSTALL)
    if tested.package == "litellm" and Version(found).base_version == MALICIOUS:
        summary = f"litellm {found} is a malicious upload that may have read this machine's secrets"
        return Finding(name, "fail", summary, CLEAN)
    if not SpecifierSet(tested.allowed, prereleases=True).contains(found):
        summary = f"{tested.package} {found} is not {tested.allowed}"
        return Finding(name, "fail", summary, f"pip install '{tested.package}{tested.allowed}'")
    newest = Version(tested.newest_series).release
    if Version(found).release[: len(newest)] > newest:
        summary = f"{tested.package} {found} is newer than the last tested, {tested.newest_series}"
        remedy = f"if something breaks, pip install '{tested.package}=={tested.newest_series}.*'"
        return Finding(name, "note", summary, remedy)
    return Finding(name, "ok", f"{tested.package} {found}")
