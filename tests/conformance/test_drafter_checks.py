"""Each check of a drafter finds the drafter that breaks its promise, and names the promise."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from tiny import build

TINY = {"tiny": partial(build, family="qwen3", intermediate_size=512)}
Failures = Callable[..., dict[str, str]]

DRAFTER = """
from mlx_provider import hookimpl
from mlx_provider.records import Drafter

mlx_provider_api = 1

class Toy:
    def propose(self, rows):
        return [[row.tokens[-1]] * row.wanted for row in rows]

def start(folder, model, options):
    return Toy()

def refuses(folder, model, options):
    return ""

@hookimpl
def mlx_drafters():
    yield Drafter("toy", refuses, start)

"""
CHANGES_THE_MODEL = """
def start(folder, model, options):
    model.model.lm_head.weight = -model.model.lm_head.weight
    return Toy()
"""
GROWS_ROWS = """
class Toy:
    def propose(self, rows):
        for row in rows:
            row.tokens.append(30)
        return [[row.tokens[-1]] * row.wanted for row in rows]
"""
RAISES = """
class Toy:
    def propose(self, rows):
        raise ValueError("no idea")
"""
TOO_MANY = """
class Toy:
    def propose(self, rows):
        return [[row.tokens[-1]] * (row.wanted + 1) for row in rows]
"""
REFUSES_BADLY = """
def refuses(folder, model, options):
    return "first\\nsecond"
"""
DRAFTERS = {
    "good": ("", set()),
    "changes the model": (CHANGES_THE_MODEL, {"same answers"}),
    "grows rows": (GROWS_ROWS, {"proposals"}),
    "raises": (RAISES, {"proposals"}),
    "too many": (TOO_MANY, {"proposals"}),
    "refuses badly": (REFUSES_BADLY, {"refusals"}),
}


QUICK = ("good", "changes the model", "grows rows")
"""The others are left to `tox -e conformance`."""


def some(toys: Iterable[str]) -> list[Any]:
    marks = pytest.mark.conformance
    return [pytest.param(toy, marks=() if toy in QUICK else marks) for toy in toys]


@pytest.mark.parametrize("toy", some(DRAFTERS))
def test_the_broken_promise_of_a_drafter_is_named(
    install_plugin: Callable[..., str], failures: Failures, toy: str
) -> None:
    source, broken = DRAFTERS[toy]
    name = install_plugin("toydrafter", DRAFTER + source)
    only = tuple(broken) or ("drafter toy",)
    assert set(failures(name, TINY, only)) == broken
