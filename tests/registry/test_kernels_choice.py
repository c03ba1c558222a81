"""Which kernels are chosen, and what becomes of those that fail."""

from collections.abc import Callable

import pytest

from mlx_provider.registry import PluginRegistry
from named_plugins import discover

Install = Callable[..., str]

KERNELS = """
from mlx_provider import Kernels, Replacement, hookimpl

def matches(device, precision):
    return {matches}

def replacements():
    {before}
    return [Replacement("somewhere", "{name}", lambda original: original)]

@hookimpl
def mlx_kernels():
    yield Kernels("{name}", matches, replacements, rank={rank})
"""


def kernels(
    name: str, *, matches: str = "device == 'cpu'", before: str = "", rank: object = 0
) -> str:
    return KERNELS.format(name=name, matches=matches, before=before or "pass", rank=rank)


def chosen(registry: PluginRegistry, device: str = "cpu", precision: str = "float32") -> str | None:
    found = registry.kernels_for(device, precision)
    return found[0] if found else None


def test_no_kernels_are_chosen_for_another_device_or_precision(install_plugin: Install) -> None:
    source = kernels("half", matches="(device, precision) == ('cuda', 'low')")
    registry = discover(install_plugin("mlx-provider", source, name="half"))
    assert chosen(registry, "cuda", "low") == "half"
    assert chosen(registry, "cuda") is None
    assert chosen(registry, "metal", "low") is None
    (plugin,) = registry.plugins
    assert plugin.records["kernels"] == ("half",)


def test_the_highest_rank_wins_and_third_parties_win_ties(install_plugin: Install) -> None:
    ours = install_plugin("mlx-provider", kernels("ours"), name="ours")
    low = install_plugin("aaa", kernels("low", rank=-1))
    tie = install_plugin("bbb", kernels("tie"))
    high = install_plugin("ccc", kernels("high", rank=1))
    assert chosen(discover(ours, low)) == "ours"
    assert chosen(discover(ours, low, tie)) == "tie"
    assert chosen(discover(ours, low, tie, high)) == "high"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (kernels("bad", matches="1 / 0", rank=9), "ZeroDivisionError"),
        (kernels("bad", before="import nowhere_to_be_found", rank=9), "ModuleNotFoundError"),
        (kernels("bad", before="return [7]", rank=9), "gave int, not Replacement"),
        (kernels("bad", before="return None", rank=9), "TypeError"),
    ],
)
def test_failed_kernels_are_noted_and_the_next_are_chosen(
    install_plugin: Install, source: str, told: str
) -> None:
    ours = install_plugin("mlx-provider", kernels("ours"), name="ours")
    registry = discover(ours, install_plugin("bad", source))
    assert [chosen(registry), chosen(registry)] == ["ours", "ours"]
    (note,) = registry.plugins[1].notes
    assert note.startswith("kernels 'bad' failed: ")
    assert told in note


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (kernels("bad", rank="'high'"), "Kernels 'bad': rank is not a whole number"),
        (kernels("bad").replace("matches, replacements", "matches, None"), "is not callable"),
        (kernels("bad").replace("rank=0", "serves=None"), "Kernels 'bad': serves is not text"),
    ],
)
def test_an_invalid_kernels_record_makes_its_plugin_fail(
    install_plugin: Install, source: str, told: str
) -> None:
    (plugin,) = discover(install_plugin("bad", source)).plugins
    assert told in (plugin.error or "")
