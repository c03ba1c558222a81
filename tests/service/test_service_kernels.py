"""Third-party kernels in a service that loads a model."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from mlx_lm.models import llama

from named_plugins import discover

Install = Callable[..., str]

KERNELS = """
from mlx_provider import Kernels, Replacement, hookimpl
from mlx_provider.records import parts_of

def counted(original):
    def call(queries, keys, values, cache=None, *args, **named):
        counted.asked.append(len(parts_of(keys, values, None)))
        return original(queries, keys, values, cache, *args, **named)
    return call

counted.asked = []

def broken(original):
    raise RuntimeError("made for another version")

def replacements():
    yield Replacement("mlx_lm.models.base", "scaled_dot_product_attention", counted)
    if {fails}:
        yield Replacement("mlx_lm.models.activations", "swiglu", broken)

@hookimpl
def mlx_kernels():
    yield Kernels("counting", lambda device, precision: True, replacements, rank=1)
"""


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the module's changed names at the end of the test."""
    for name in ("scaled_dot_product_attention", "swiglu"):
        monkeypatch.setattr(llama, name, getattr(llama, name))


Ask = Callable[..., list[int]]


@pytest.fixture
def ask(install_plugin: Install, own_model: Any, build_tiny: Any) -> Ask:
    """Answer two prompts at once. Returns the number of parts of each call of attention."""

    def run(*, fails: bool) -> list[int]:
        name = install_plugin("counting", KERNELS.format(fails=fails))
        registry = discover("text", name)
        tiny = own_model(build_tiny("llama"), registry=registry)
        first, second = (tiny.start(text, max_tokens=12) for text in ("Hello", "A lazy dog " * 200))
        assert len(tiny.read(first).only.content) > 0
        assert len(tiny.read(second).only.content) > 0
        asked: list[int] = sys.modules[name].counted.asked
        return asked

    return run


def test_functions_of_the_kernels_are_called(ask: Ask) -> None:
    assert ask(fails=False)


def test_failed_kernels_are_removed_and_the_model_serves(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    assert not ask(fails=True)
    assert "kernels counting are left out: RuntimeError: made for another version" in caplog.text
