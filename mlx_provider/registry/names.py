"""Names without regard to case, hyphens, underscores and dots."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_MARKS = re.compile(r"[-_. ]")


def canonical(name: str) -> str:
    """The common form of `My-Format`, `my_format` and `myformat`."""
    return _MARKS.sub("", name).lower()


def near(name: str, known: Iterable[str]) -> list[str]:
    spelt: dict[str, str] = {}
    for each in known:
        spelt.setdefault(canonical(each), each)
    return [spelt[match] for match in get_close_matches(canonical(name), spelt, n=3)]
