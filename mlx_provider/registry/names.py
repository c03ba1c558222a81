"""Names as people write them: case, hyphens, underscores and dots make no difference."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_MARKS = re.compile(r"[-_. ]")


def canonical(name: str) -> str:
    """What `My-Format`, `my_format` and `myformat` have in common."""
    return _MARKS.sub("", name).lower()


def near(name: str, known: Iterable[str]) -> list[str]:
    """Known names that `name` may be a slip of, the nearest first."""
    spelt: dict[str, str] = {}
    for each in known:
        spelt.setdefault(canonical(each), each)
    return [spelt[match] for match in get_close_matches(canonical(name), spelt, n=3)]
