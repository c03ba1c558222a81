"""What our bounds let a resolver take."""

import configparser
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MALICIOUS = {"litellm": "1.107.0"}


def requirements() -> Iterator[Requirement]:
    """Of the package, its extras, the dependency groups, and tox's environments."""
    project = PYPROJECT["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    lists += PYPROJECT["dependency-groups"].values()
    yield from (Requirement(each) for one in lists for each in one if isinstance(each, str))
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    for section in tox.values():
        lines = section.get("deps", "").split("\n")
        yield from (Requirement(line.split(": ")[-1]) for line in lines if line)


def test_no_bound_admits_a_malicious_upload() -> None:
    found = [each for each in requirements() if each.name in MALICIOUS]
    assert len(found) >= 4, "the package, its extra, two environments of tox"
    for each in found:
        assert not each.specifier.contains(MALICIOUS[each.name], prereleases=True), str(each)


def test_the_litellm_bound_admits_each_tested_release_line() -> None:
    bound, *tested = (each.specifier for each in requirements() if each.name == "litellm")
    for version in ("1.106.2", "1.109.1", "1.110.2"):
        assert bound.contains(version)
        assert f"=={version.rpartition('.')[0]}.*" in map(str, tested)
