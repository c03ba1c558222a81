"""Drafters: answers are those of the model without drafts. Kernels: functions give the results of
the originals. A check is a function, and its docstring is the promise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...engine.execution.probe import Probe, probe
from ...engine.request import Request, SamplingParams
from ...engine.speculation.speculation import source_of, speculation_of
from ...families.checkpoint import read_json
from ...isolation import Isolation
from ...records import (
    Drafter,
    Drafting,
    DraftOptions,
    DraftRow,
    Function,
    Kernels,
    LoadedModel,
    LoadOptions,
    Prompt,
    Replacement,
    ShowsHidden,
)
from ...serving.kernels import device_kind, equip, install, remove
from ...upstream.patching import Unpatched
from .. import DEMO, HYBRID, demo_checkpoint
from ..driver import Eager, alone, greedy, new_engine, new_request, output_of, run
from . import Case, Laboratory, NotApplicable, cases, demand, same
from .models import FORMATS

TEXT = [20 + (i * i * 31 + i // 7) % 300 for i in range(90)]
LENGTHS = (12, 40, 97, 150)
"""Tokens of prompts that repeat `TEXT`."""
LENGTH = 700
"""Tokens of a prompt: enough for a kernel."""
HALF = 2.0**-6
"""Allowed relative difference in bfloat16: twice its last bit."""
ANYWHERE = [(device, kept) for device in ("cpu", "metal", "cuda") for kept in ("float32", "low")]
KEY = "conformance"


def loaded(lab: Laboratory, folder: Path, dtype: str) -> LoadedModel:
    family, _ = lab.registry.family_for(read_json(folder / "config.json"))
    return family.load(folder, LoadOptions(dtype=dtype))


@dataclass(frozen=True)
class Subject:
    folder: Path
    model: LoadedModel
    options: DraftOptions


@dataclass
class Guessing:
    drafter: Drafter
    lab: Laboratory

    @cached_property
    def subject(self) -> Subject:
        refusals: list[str] = []
        for subject in self.subjects():
            refusal = self.refusal(subject)
            if not refusal:
                return subject
            refusals.append(refusal)
        raise NotApplicable(
            f"it refuses every model that is at hand ({'; '.join(dict.fromkeys(refusals))}): "
            "the hook pytest_mlx_conformance_models can give another"
        )

    def refusal(self, subject: Subject) -> str:
        """Empty: it can draft."""
        summary = self.drafter.refuses(subject.folder, subject.model, subject.options)
        demand(isinstance(summary, str), f"refuses gave {summary!r}, not text")
        model = subject.model
        if not summary and self.drafter.hidden:
            shows = isinstance(model, ShowsHidden) and model.shows_hidden
            return "" if shows else "the model does not show its hidden states"
        return summary

    def subjects(self) -> Iterator[Subject]:
        """The author's models; or the demo models, alone and with a model that drafts."""
        writers = self.lab.builders(self.drafter.name)
        for write in writers.values():
            folder = self.lab.folder()
            options = write(folder)
            given = options if isinstance(options, DraftOptions) else DraftOptions()
            yield Subject(folder, self._equipped(folder), given)
        if writers:
            return
        other = demo_checkpoint(self.lab.folder())
        for folder in (DEMO, HYBRID):
            model = self._equipped(folder)
            for given in (DraftOptions(), DraftOptions(model=other)):
                yield Subject(folder, model, given)

    def _equipped(self, folder: Path) -> LoadedModel:
        model = loaded(self.lab, folder, "float32")
        equip(model, self.lab.registry)
        return model

    @cached_property
    def layout(self) -> Probe:
        model = self.subject.model
        found = probe(model, model.make_cache, model.kv_layouts)
        if not found.drafts:
            raise NotApplicable(f"nothing is drafted for the model: {'; '.join(found.notes)}")
        return found

    @cached_property
    def expected(self) -> list[list[int]]:
        model = self.subject.model
        return [output_of(alone(model, request)).tokens for request in _requests()]

    @cached_property
    def drafting(self) -> Drafting:
        """Started after `expected` is computed."""
        demand(bool(self.expected), "the model says nothing")
        subject = self.subject
        return self.drafter.start(subject.folder, subject.model, subject.options)

    def answers(self, drafting: Drafting) -> tuple[list[list[int]], int]:
        """And the number of drafts."""
        model = self.subject.model
        speculation = speculation_of(
            [source_of(self.drafter, drafting, model)], model, policy=Eager()
        )
        engine = new_engine(
            model, layout=self.layout.layout, mixes=self.layout.mixes, speculation=speculation
        )
        requests = _requests()
        for request in requests:
            engine.submit(request)
            engine.step()
        run(engine)
        return [output_of(each).tokens for each in requests], sum(r.drafted for r in requests)


def _requests() -> list[Request]:
    """Every second request has few tokens to choose from, and repeats them."""
    few = SamplingParams(temperature=0, logit_bias=tuple((token, 40.0) for token in TEXT[:3]))
    plain = SamplingParams(temperature=0)
    return [
        new_request((TEXT * 2)[:length], max_tokens=24, params=few if i % 2 else plain)
        for i, length in enumerate(LENGTHS)
    ]


class Spy:
    """Notes what a drafter does wrong."""

    def __init__(self, inner: Drafting) -> None:
        self._inner = inner
        self.calls = 0
        self.problems: list[str] = []

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | None]:
        self.calls += 1
        before = [list(row.tokens) for row in rows]
        with Isolation() as trying:
            found = list(self._inner.propose(rows))
        if trying.fault is not None:
            self.problems.append(f"propose raised {trying.fault.summary}")
            raise RuntimeError("the drafter failed")
        if len(found) != len(rows):
            self.problems.append(f"{len(found)} proposals for {len(rows)} rows")
        for row, tokens, own in zip(rows, before, found, strict=False):
            if row.tokens != tokens:
                self.problems.append("propose changed the tokens of a row")
            if own is not None and len(own) > row.wanted:
                self.problems.append(f"{len(own)} drafts where {row.wanted} were wanted")
        return found


def refusals(of: Guessing) -> None:
    """It says in one line for which models it cannot draft, and why."""
    for subject in of.subjects():
        summary = of.refusal(subject)
        demand("\n" not in summary, f"refuses gave more than one line: {summary!r}")


def same_answers(of: Guessing) -> None:
    """Greedy answers are the same with and without it: it changes nothing of the model."""
    expected = of.expected
    spy = Spy(of.drafting)
    found, drafted = of.answers(spy)
    same(found, expected, "answers with drafts are other ones than without")
    if not drafted and not spy.problems:
        raise NotApplicable("it guessed nothing in these texts")


def proposals(of: Guessing) -> None:
    """It proposes no more than is wanted, for every row in order, and changes nothing of them."""
    spy = Spy(of.drafting)
    of.answers(spy)
    demand(not spy.problems, "; ".join(dict.fromkeys(spy.problems)))
    demand(spy.calls > 0, "it was never asked")


@dataclass
class Computing:
    kernels: Kernels
    write: Callable[[Path], object]
    lab: Laboratory
    kept_in: str
    calls: dict[str, int] = field(default_factory=dict)
    apart: dict[str, float] = field(default_factory=dict)
    """Largest difference by function, as a share of its tolerance."""

    @cached_property
    def model(self) -> LoadedModel:
        folder = self.lab.folder()
        self.write(folder)
        model = loaded(self.lab, folder, self.kept_in)
        if not self.kernels.matches(device_kind(), model.info.precision):
            raise NotApplicable(f"it is not made for {device_kind()} in {self.kept_in}")
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
    wanted, got = (dict(tree_flatten({"": each})) for each in (expected, found))
    if wanted.keys() != got.keys():
        return float("inf")
    worst = 0.0
    for name, array in wanted.items():
        if not isinstance(array, mx.array):
            continue
        if got[name].shape != array.shape or got[name].dtype != array.dtype:
            return float("inf")
        allowed = tolerance if array.dtype == mx.float32 else max(tolerance, HALF)
        a, b = (each.astype(mx.float32) for each in (array, got[name]))
        scale = float(mx.max(mx.abs(a))) + 1e-20
        share = float(mx.max(mx.abs(a - b))) / scale / allowed
        worst = max(worst, share if share == share else float("inf"))
    return worst


def results(of: Computing) -> None:
    """Each call gives the original's result, within the tolerance that its `Replacement` tells."""
    of.said([of.watched(each) for each in of.kernels.replacements()], 4)
    wrong = [
        f"{name} by {apart:.3g} times its tolerance"
        for name, apart in of.apart.items()
        if not apart <= 1
    ]
    demand(not wrong, f"results differ from the original's: {', '.join(wrong)}")
    if not of.calls:
        raise NotApplicable("the model calls none of the functions that are replaced")


def answers(of: Computing) -> None:
    """Greedy answers in float32 are the same with and without."""
    if of.kept_in != FORMATS[0]:
        raise NotApplicable("other rounding gives other tokens in this format")
    without = of.said([], 12)
    same(of.said(list(of.kernels.replacements()), 12), without, "greedy answers differ")


def matching(kernels: Kernels) -> None:
    """`matches` takes any device and precision."""
    for device, precision in ANYWHERE:
        found = kernels.matches(device, precision)
        demand(isinstance(found, bool), f"matches({device!r}, {precision!r}) gave {found!r}")


def functions(kernels: Kernels) -> None:
    """What it replaces exists in upstream's modules."""
    if not kernels.matches(device_kind(), "float32"):
        raise NotApplicable(f"it is not made for {device_kind()}")
    for each in kernels.replacements():
        original: Any = importlib.import_module(each.module)
        for name in each.name.split("."):
            original = getattr(original, name, None)
        demand(callable(original), f"{each.module} has no function {each.name!r}")
        demand(callable(each.make(original)), f"make of {each.name!r} gave no function")


DRAFTER_CHECKS = (refusals, same_answers, proposals)
KERNEL_CHECKS = (results, answers)
ONCE = (matching, functions)


def cases_of(
    drafters: Iterable[Drafter], kernels: Iterable[Kernels], lab: Laboratory
) -> Iterator[Case]:
    for drafter in drafters:
        guessing = cache(partial(Guessing, drafter, lab))
        yield from cases(f"drafter {drafter.name}", "", DRAFTER_CHECKS, guessing)
    for each in kernels:
        subject = f"kernels {each.name}"
        for label, write in (lab.builders(each.name) or KNOWN).items():
            for kept_in in FORMATS[:2]:
                computing = partial(Computing, each, write, lab, kept_in)
                yield from cases(subject, f"{label}, {kept_in}", KERNEL_CHECKS, computing)
        yield from cases(subject, "", ONCE, partial(_itself, each))


def _itself(kernels: Kernels) -> Kernels:
    return kernels


def _copied(demo: Path, folder: Path) -> None:
    for path in demo.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


KNOWN: dict[str, Callable[[Path], object]] = {
    "text": demo_checkpoint,
    "demo model": partial(_copied, DEMO),
    "demo hybrid": partial(_copied, HYBRID),
}
"""Models that call replaced functions, if the author gives none."""
