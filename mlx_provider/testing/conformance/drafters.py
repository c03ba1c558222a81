"""Drafters: answers are those of the model without drafts. A check is a function, and its docstring
is the promise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path

from ...engine.execution.probe import probe
from ...engine.request import Request, SamplingParams
from ...engine.speculation.speculation import source_of, speculation_of
from ...families.checkpoint import read_json
from ...isolation import Fault, attempt
from ...records import (
    Drafter,
    Drafting,
    DraftOptions,
    DraftRow,
    LoadedModel,
    LoadOptions,
    ShowsHidden,
)
from ...serving.loader import equip
from .. import DEMO, HYBRID, demo_checkpoint
from ..driver import Eager, alone, new_engine, new_request, output_of, run
from . import Case, Laboratory, NotApplicable, cases, demand, same

TEXT = [20 + (i * i * 31 + i // 7) % 300 for i in range(90)]
LENGTHS = (12, 40, 97, 150)
"""Tokens of prompts that repeat `TEXT`."""


@dataclass
class Guessing:
    """A drafter on the first model that it does not refuse."""

    _drafter: Drafter
    _lab: Laboratory

    def refusal(self, folder: Path, model: LoadedModel, options: DraftOptions) -> str:
        """Empty: it can draft."""
        summary = self._drafter.refuses(folder, model, options)
        demand(isinstance(summary, str), f"refuses gave {summary!r}, not text")
        shows = isinstance(model, ShowsHidden) and model.shows_hidden
        hidden = (
            "" if shows or not self._drafter.hidden else "the model does not show its hidden states"
        )
        return summary or hidden

    def subjects(self) -> Iterator[tuple[Path, LoadedModel, DraftOptions]]:
        """The author's models; or the demo models, alone and with a model that drafts."""
        for write in (writers := self._lab.builders(self._drafter.name)).values():
            folder = self._lab.folder()
            options = write(folder)
            given = options if isinstance(options, DraftOptions) else DraftOptions()
            yield folder, self._load(folder), given
        for folder in () if writers else (DEMO, HYBRID):
            model = self._load(folder)
            other = demo_checkpoint(self._lab.folder())
            for given in (DraftOptions(), DraftOptions(model=other)):
                yield folder, model, given

    def _load(self, folder: Path) -> LoadedModel:
        family, _ = self._lab.registry.family_for(read_json(folder / "config.json"))
        model = family.load(folder, LoadOptions(dtype="float32"))
        equip(model, self._lab.registry)
        return model

    @cached_property
    def subject(self) -> tuple[Path, LoadedModel, DraftOptions]:
        refusals = dict[str, None]()
        for subject in self.subjects():
            refusal = self.refusal(*subject)
            if not refusal:
                return subject
            refusals[refusal] = None
        raise NotApplicable(
            f"it refuses every model that is at hand ({'; '.join(refusals)}): "
            "the hook pytest_mlx_conformance_models can give another"
        )

    @cached_property
    def expected(self) -> list[list[int]]:
        return [output_of(alone(self.subject[1], request)).tokens for request in _requests()]

    @cached_property
    def _drafting(self) -> Drafting:
        return self._drafter.start(*self.subject)

    def answers(self) -> tuple[list[list[int]], int, Spy]:
        """And the number of drafts."""
        _, model, _ = self.subject
        layout = probe(model, model.make_cache, model.kv_layouts)
        if not layout.drafts:
            raise NotApplicable(f"nothing is drafted for the model: {'; '.join(layout.notes)}")
        _ = self.expected  # before the drafter starts
        spy = Spy(self._drafting)
        source = source_of(self._drafter, spy, model)
        engine = new_engine(
            model,
            layout=layout.layout,
            mixes=layout.mixes,
            speculation=speculation_of([source], model, policy=Eager()),
        )
        requests = _requests()
        for request in requests:
            engine.submit(request)
            engine.step()
        run(engine)
        return [output_of(r).tokens for r in requests], sum(r.drafted for r in requests), spy


def _requests() -> list[Request]:
    """Every second request has few tokens to choose from, and repeats them."""
    few = SamplingParams(temperature=0, logit_bias=tuple((token, 40.0) for token in TEXT[:3]))
    plain = SamplingParams(temperature=0)
    return [
        new_request((TEXT * 2)[:length], max_tokens=24, params=few if i % 2 else plain)
        for i, length in enumerate(LENGTHS)
    ]


@dataclass
class Spy:
    """Notes what a drafter does wrong."""

    _inner: Drafting
    calls: int = 0
    problems: list[str] = field(default_factory=list)

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | None]:
        self.calls += 1
        before = [list(row.tokens) for row in rows]
        found = attempt(lambda: list(self._inner.propose(rows)))
        if isinstance(found, Fault):
            self.problems.append(f"propose raised {found.summary}")
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
        summary = of.refusal(*subject)
        demand("\n" not in summary, f"refuses gave more than one line: {summary!r}")


def same_answers(of: Guessing) -> None:
    """Greedy answers are the same with and without it: it changes nothing of the model."""
    found, drafted, spy = of.answers()
    same(found, of.expected, "answers with drafts are other ones than without")
    if not drafted and not spy.problems:
        raise NotApplicable("it guessed nothing in these texts")


def proposals(of: Guessing) -> None:
    """It proposes no more than is wanted, for every row in order, and changes nothing of them."""
    _, _, spy = of.answers()
    demand(not spy.problems, "; ".join(dict.fromkeys(spy.problems)))
    demand(spy.calls > 0, "it was never asked")


DRAFTER_CHECKS = (refusals, same_answers, proposals)


def cases_of(drafters: Iterable[Drafter], lab: Laboratory) -> Iterator[Case]:
    for drafter in drafters:
        guessing = cache(partial(Guessing, drafter, lab))
        yield from cases(f"drafter {drafter.name}", "", DRAFTER_CHECKS, guessing)
