"""Drafters: answers are those of the model without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

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
    LoadedModel,
    LoadOptions,
    ShowsHidden,
)
from ...registry import PluginRegistry
from ...serving.kernels import equip
from ..driver import alone, new_engine, new_request, output_of, run
from ..schedules import Eager
from ..tiny import build
from .check import Check, NotApplicable, demand, same
from .specimens import Write

TINY: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {},
    "qwen3_5": {"mtp_num_hidden_layers": 1, "foreseeable": True},
}
"""Our models, if the author gives none."""
TEXT = [20 + (i * i * 31 + i // 7) % 300 for i in range(90)]
LENGTHS = (12, 40, 97, 150)
"""Tokens of prompts that repeat `TEXT`."""


@dataclass(frozen=True)
class Subject:
    folder: Path
    model: LoadedModel
    options: DraftOptions


@dataclass
class Guessing:
    drafter: Drafter
    writers: Mapping[str, Write]
    registry: PluginRegistry
    new_folder: Callable[[], Path]
    refusals: list[str] = field(default_factory=list)

    @cached_property
    def subject(self) -> Subject:
        self.refusals.clear()
        for subject in self.subjects():
            refusal = self.refusal(subject)
            if not refusal:
                return subject
            self.refusals.append(refusal)
        raise NotApplicable(
            f"it refuses every model that is at hand ({'; '.join(dict.fromkeys(self.refusals))}): "
            "the hook pytest_mlx_conformance_models can give another"
        )

    def refusal(self, subject: Subject) -> str:
        """Empty: it can draft."""
        summary = self.drafter.refuses(subject.folder, subject.model, subject.options)
        demand(isinstance(summary, str), f"refuses gave {summary!r}, not text")
        model = subject.model
        if not summary and self.drafter.hidden:
            shown = isinstance(model, ShowsHidden) and model.shows_hidden
            return "" if shown else "the model does not show its hidden states"
        return summary

    def subjects(self) -> Iterator[Subject]:
        """The author's models, or ours if there are none."""
        for write in self.writers.values():
            folder = self.new_folder()
            given = write(folder)
            options = given if isinstance(given, DraftOptions) else DraftOptions()
            yield Subject(folder, self._loaded(folder), options)
        if self.writers:
            return
        smaller = build(self.new_folder(), "qwen3", seed=4, num_hidden_layers=2)
        for name, more in TINY.items():
            folder = build(self.new_folder(), name, **more)
            model = self._loaded(folder)
            for options in (DraftOptions(), DraftOptions(model=smaller)):
                yield Subject(folder, model, options)

    def _loaded(self, folder: Path) -> LoadedModel:
        family, _ = self.registry.family_for(read_json(folder / "config.json"))
        model = family.load(folder, LoadOptions())
        equip(model, self.registry)
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
        model = self.subject.model
        source = source_of(self.drafter, drafting, model)
        speculation = speculation_of([source], model, policy=Eager())
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
    def __init__(self, inner: Drafting, change: Callable[[int], int] = int) -> None:
        self._inner = inner
        self._change = change
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
        self.problems += self._wrong(rows, before, found)
        return [None if own is None else [self._change(token) for token in own] for own in found]

    def _wrong(
        self, rows: Sequence[DraftRow], before: Sequence[list[int]], found: Sequence[Any]
    ) -> Iterator[str]:
        if len(found) != len(rows):
            yield f"{len(found)} proposals for {len(rows)} rows"
        for row, tokens, own in zip(rows, before, found, strict=False):
            if row.tokens != tokens:
                yield "propose changed the tokens of a row"
            if own is not None and len(own) > row.wanted:
                yield f"{len(own)} drafts where {row.wanted} were wanted"


def same_answers(of: Guessing) -> None:
    expected = of.expected
    spy = Spy(of.drafting)
    found, drafted = of.answers(spy)
    same(found, expected, "answers with drafts are other ones than without")
    if not drafted and not spy.problems:
        raise NotApplicable("it guessed nothing in these texts")


def wrong_guesses(of: Guessing) -> None:
    expected, vocab = of.expected, of.subject.model.info.vocab_size
    found, _ = of.answers(Spy(of.drafting, lambda token: (int(token) + 1) % vocab))
    same(found, expected, "answers with wrong drafts are other ones than without")


def proposals(of: Guessing) -> None:
    spy = Spy(of.drafting)
    of.answers(spy)
    demand(not spy.problems, "; ".join(dict.fromkeys(spy.problems)))
    demand(spy.calls > 0, "it was never asked")


def model_untouched(of: Guessing) -> None:
    expected = of.expected
    of.answers(of.drafting)
    model = of.subject.model
    found = [output_of(alone(model, request)).tokens for request in _requests()]
    same(found, expected, "the model itself gives other answers since the drafter has started")


def refusals(of: Guessing) -> None:
    for subject in of.subjects():
        summary = of.refusal(subject)
        demand("\n" not in summary, f"refuses gave more than one line: {summary!r}")


CHECKS: tuple[Check[Guessing], ...] = (
    Check("refusals", "It says in one line for which models it cannot draft, and why.", refusals),
    Check("same answers", "Greedy answers are the same with and without it.", same_answers),
    Check("wrong guesses", "Guesses that are wrong change no answer.", wrong_guesses),
    Check(
        "proposals",
        "It proposes no more than is wanted, for every row in order, and changes nothing of them.",
        proposals,
    ),
    Check("model untouched", "The model itself says what it said before.", model_untouched),
)
