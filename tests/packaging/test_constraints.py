"""`constraints.txt`, by which pip installs versions that are known to work."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from mlx_provider.doctor.versions import TESTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
PINS = {
    canonicalize_name(each.name): each
    for each in (Requirement(line) for line in LINES if not line.startswith("#"))
}
VERSIONS = {name: str(next(iter(pin.specifier)).version) for name, pin in PINS.items()}
EXTRAS = ("cpu", "proxy")
"""Of the commands of the README."""


def needed() -> list[Requirement]:
    extras = [each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra]]
    return [Requirement(each) for each in (*PROJECT["dependencies"], *extras)]


def test_every_constraint_pins_one_package_to_one_version() -> None:
    assert len(PINS) == len([line for line in LINES if not line.startswith("#")])
    for pin in PINS.values():
        assert [each.operator for each in pin.specifier] == ["=="], str(pin)
        assert (pin.extras, pin.marker, pin.url) == (set(), None, None), str(pin)


@pytest.mark.parametrize("requirement", needed(), ids=str)
def test_every_pinned_version_satisfies_the_project_bounds(requirement: Requirement) -> None:
    assert requirement.specifier.contains(VERSIONS[canonicalize_name(requirement.name)])


def requirements_of(name: str) -> list[str]:
    """Of a package that is installed in the version that is pinned; of others nothing."""
    try:
        same = version(name) == VERSIONS.get(name, version("mlx-provider"))
        return (requires(name) or []) if same else []
    except PackageNotFoundError:
        return []


def test_every_package_that_the_readme_installs_is_pinned() -> None:
    """On this platform, with the versions that are pinned."""
    waiting, seen = [("mlx-provider", EXTRAS)], set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for each in map(Requirement, requirements_of(name)):
            wanted = [{"extra": extra} for extra in (*extras, "")]
            if each.marker is None or any(each.marker.evaluate(one) for one in wanted):
                waiting.append((canonicalize_name(each.name), tuple(sorted(each.extras))))
    missing = {name for name, _ in seen} - PINS.keys() - {"mlx-provider"}
    assert missing == set()


def test_the_pinned_mlx_backends_have_the_version_of_mlx() -> None:
    assert VERSIONS["mlx-metal"] == VERSIONS["mlx"] == VERSIONS["mlx-cpu"]


def test_the_pinned_versions_belong_to_tested_series() -> None:
    for each in TESTED:
        pin = Version(VERSIONS[each.package])
        assert (pin.major, pin.minor) <= Version(each.newest_series).release[:2], each.package
        assert SpecifierSet(each.allowed).contains(pin), each.package


def test_the_readme_and_tox_install_with_the_constraints_file() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt -e '.[cpu,proxy]'" in readme
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert "PIP_CONSTRAINT = {tox_root}{/}constraints.txt" in tox
