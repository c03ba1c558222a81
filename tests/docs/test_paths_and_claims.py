"""Files that the pages name exist, and a claim that two pages make is the same on both."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("docs", "examples", "mlx_provider", "plugins", "tests")
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w/.-]+)`")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = NAMED.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_files_in_the_life_of_a_request_exist() -> None:
    (steps,) = re.findall(
        r"^## Life of a request$(.*?)^## ", read("docs/architecture.md"), re.DOTALL | re.MULTILINE
    )
    assert re.findall(r"^(\d)\. ", steps, re.MULTILINE) == list("12345678")
    named = re.findall(r"`([\w/]+\.py)`", steps)
    assert [path for path in named if not (ROOT / "mlx_provider" / path).exists()] == []


def test_the_glossary_of_the_guide_has_at_most_25_terms() -> None:
    (terms,) = re.findall(r"^## Terms$(.*?)^## ", read("CONTRIBUTING.md"), re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^\| ", terms, re.MULTILINE)) - 1 <= 25
