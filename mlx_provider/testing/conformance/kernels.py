"""Kernels: replaced functions give the results of the originals."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...families.checkpoint import read_json
from ...records import Function, Kernels, LoadedModel, LoadOptions, Prompt, Replacement
from ...registry import PluginRegistry
from ...serving.kernels import device_kind, install, remove
from ...upstream.patching import Unpatched
from ..tiny import build
from ..tiny.models import greedy
from .check import Check, NotApplicable, demand, same
from .specimens import FORMATS, Write, halved

TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"intermediate_size": 512},
    "gemma3_text": {"intermediate_size": 512},
    "qwen3_5": {"intermediate_size": 512},
}
"""Our models that call the replaced functions, if the author gives none."""
LENGTH = 700
"""Tokens of a prompt: enough for a kernel."""
HALF = 2.0**-6
"""Allowed relative difference in bfloat16: twice its last bit."""
ANYWHERE = [(device, kept) for device in ("cpu", "metal", "cuda") for kept in ("float32", "low")]
KEY = "conformance"


@dataclass
class Computing:
    kernels: Kernels
    label: str
    kept_in: str
    write: Write
    registry: PluginRegistry
    new_folder: Callable[[], Path]
    calls: dict[str, int] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    """Largest difference by function, as a share of its tolerance."""

    @cached_property
    def model(self) -> LoadedModel:
        folder = self.new_folder()
        self.write(folder)
        if self.kept_in != FORMATS[0]:
            other = self.new_folder()
            halved(folder, other)
            folder = other
        family, _ = self.registry.family_for(read_json(folder / "config.json"))
        model = family.load(folder, LoadOptions())
        if not self.kernels.matches(device_kind(), model.info.precision):
            summary = f"it is not made for {device_kind()} in {self.kept_in}"
            raise NotApplicable(summary)
        return model

    def said(self, replacements: list[Replacement], count: int) -> list[int]:
        """Greedy tokens of the model with these functions in place of upstream's."""
        prompt = Prompt([(7919 * i) % 300 + 20 for i in range(LENGTH)])
        with Unpatched(self.model.model):
            install(KEY, replacements, self.model.model)
            try:
                return greedy(self.model, prompt, count, chunk=LENGTH // 2)
            finally:
                remove(KEY, replacements, self.model.model)

    def watched(self, each: Replacement) -> Replacement:
        return replace(each, make=partial(self._with_original, each))

    def _with_original(self, each: Replacement, original: Function) -> Function:
        ours = each.make(original)

        def call(*args: Any, **more: Any) -> Any:
            expected = original(*args, **more)
            found = ours(*args, **more)
            self.calls[each.name] = self.calls.get(each.name, 0) + 1
            apart = _apart(expected, found, each.tolerance)
            self.apart[each.name] = max(self.apart.get(each.name, 0.0), apart)
            return expected

        return call


def _apart(expected: Any, found: Any, tolerance: float) -> float:
    """As a share of the tolerance; infinite if shapes or dtypes differ."""
    pairs = [dict(tree_flatten({"": each})) for each in (expected, found)]
    if pairs[0].keys() != pairs[1].keys():
        return float("inf")
    worst = 0.0
    for name, wanted in pairs[0].items():
        got = pairs[1][name]
        if not isinstance(wanted, mx.array):
            continue
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return float("inf")
        allowed = tolerance if wanted.dtype == mx.float32 else max(tolerance, HALF)
        a, b = (each.astype(mx.float32) for each in (wanted, got))
        scale = float(mx.max(mx.abs(a))) + 1e-20
        share = float(mx.max(mx.abs(a - b))) / scale / allowed
        worst = max(worst, share if share == share else float("inf"))
    return worst


def matching(of: Computing) -> None:
    for device, precision in ANYWHERE:
        found = of.kernels.matches(device, precision)
        demand(isinstance(found, bool), f"matches({device!r}, {precision!r}) gave {found!r}")


def functions(of: Computing) -> None:
    if not of.kernels.matches(device_kind(), "float32"):
        raise NotApplicable(f"it is not made for {device_kind()}")
    for each in of.kernels.replacements():
        original: Any = importlib.import_module(each.module)
        for name in each.name.split("."):
            original = getattr(original, name, None)
        demand(callable(original), f"{each.module} has no function {each.name!r}")
        demand(callable(each.make(original)), f"make of {each.name!r} gave no function")


def results(of: Computing) -> None:
    model = of.model
    demand(model is not None, "there is no model")
    of.said([of.watched(each) for each in of.kernels.replacements()], 4)
    wrong = {name: apart for name, apart in of.apart.items() if not apart <= 1}
    summary = ", ".join(
        f"{name} by {apart:.3g} times its tolerance" for name, apart in wrong.items()
    )
    demand(not wrong, f"results differ from the original's: {summary}")
    if not of.calls:
        raise NotApplicable("the model calls none of the functions that are replaced")


def answers(of: Computing) -> None:
    if of.kept_in != FORMATS[0]:
        raise NotApplicable("other rounding gives other tokens in this format")
    model = of.model
    demand(model is not None, "there is no model")
    without = of.said([], 12)
    same(of.said(list(of.kernels.replacements()), 12), without, "greedy answers differ")


CHECKS: tuple[Check[Computing], ...] = (
    Check(
        "results",
        "Each call gives the original's result, within the tolerance that its `Replacement` tells.",
        results,
    ),
    Check("answers", "Greedy answers in float32 are the same with and without.", answers),
)
ONCE: tuple[Check[Computing], ...] = (
    Check("matching", "`matches` takes any device and precision.", matching),
    Check("functions", "What it replaces exists in upstream's modules.", functions),
)


def known_models() -> dict[str, Write]:
    return {name: partial(_built, name, more) for name, more in TINY.items()}


def _built(name: str, more: Mapping[str, Any], folder: Path) -> Path:
    return build(folder, name, **more)
