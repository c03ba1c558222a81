"""Each change is a file of `changelog.d/`, of which a release makes its part of the changelog."""

import re
import tomllib
from pathlib import Path

import mlx_provider

ROOT = Path(__file__).parents[2]
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
KINDS = "|".join(each["directory"] for each in TOOL["type"])
NAME = re.compile(rf"\+[a-z0-9][a-z0-9-]*\.({KINDS})\.md")
FRAGMENTS = sorted(set((ROOT / TOOL["directory"]).iterdir()) - {ROOT / "changelog.d/README.md"})
CHANGES = (ROOT / TOOL["filename"]).read_text(encoding="utf-8")


def test_every_changelog_fragment_is_one_paragraph_of_a_known_kind() -> None:
    for path in FRAGMENTS:
        text, name = path.read_text(encoding="utf-8"), path.name
        assert NAME.fullmatch(name), f"{name}: it is +<words-with-dashes>.<one of {KINDS}>.md"
        assert re.fullmatch(r"[^\s#*-].*\.\n", text, re.DOTALL), f"{name} ends with a full stop"
        assert "\n\n" not in text, name
        assert max(map(len, text.splitlines())) <= 98, name  # the list puts two characters before


def test_the_changelog_has_this_version_or_fragments_for_the_next() -> None:
    assert "<!-- towncrier release notes start -->\n" in CHANGES
    assert FRAGMENTS or f"## {mlx_provider.__version__} " in CHANGES
