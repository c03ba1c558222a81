"""Cases in which ours is not faster, and answers that differ from those alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from .others import OURS
from .rows import METRICS, Figure, Row


def is_ours(server: str) -> bool:
    return server.startswith(OURS)


@dataclass(frozen=True)
class Ratio:
    """Ours over another server's in one case; above 1, ours is better, for every metric."""

    ours: Row
    other: Row
    metric: str
    rounds: tuple[float, ...]
    """Of each round in which both have a figure."""

    @property
    def value(self) -> float:
        return median(self.rounds)

    @property
    def unsure(self) -> bool:
        """Whether the rounds disagree."""
        return min(self.rounds) < 1 < max(self.rounds)


def ratios(rows: Sequence[Row], server: str = OURS) -> Iterator[Ratio]:
    """Ours with its defaults and each other server, if both answered every request."""
    for ours, others in _cases(rows, server):
        for other in others:
            for metric in METRICS:
                rounds = _rounds(ours, other, metric)
                if rounds and not ours.refused and not other.refused:
                    yield Ratio(ours, other, metric, rounds)


def not_faster(rows: Sequence[Row]) -> list[Ratio]:
    """Ratios at 1 or below, the worst first."""
    return sorted((r for r in ratios(rows) if r.value <= 1), key=lambda ratio: ratio.value)


def without_rival(rows: Sequence[Row]) -> list[Row]:
    """Cases of ours with figures, but without a figure of another server."""
    held = {id(ratio.ours) for ratio in ratios(rows)}
    ours = [row for row in rows if row.server == OURS and row.figures and not row.refused]
    return [row for row in ours if id(row) not in held]


def refusals(rows: Sequence[Row]) -> list[Row]:
    """Cases in which ours has no figures for some of the requests."""
    return [row for row in rows if row.server == OURS and row.figures and row.refused]


def without_figure(rows: Sequence[Row]) -> Iterator[tuple[Row, str]]:
    """Cases of ours, and metrics for which only another server has a figure."""
    for ours, others in _cases(rows, OURS):
        for metric in METRICS:
            there = any(figure(each.figures.get(metric, ())) is not None for each in others)
            if there and not ours.refused and figure(ours.figures.get(metric, ())) is None:
                yield ours, metric


def answers_wrongly(rows: Sequence[Row], row: Row) -> bool:
    """Whether that server, with that model, has answers that differ in a batch."""
    who = row.server, row.model, row.format
    return any((r.server, r.model, r.format) == who for r in not_as_alone(rows))


def not_as_alone(rows: Sequence[Row]) -> list[Row]:
    """Rows of any server with an answer that differs in a batch."""
    return [row for row in rows if row.equal < row.compared]


def best(rows: Sequence[Row], ours: Row, metric: str) -> Ratio | None:
    """Our ratio to the best other server by that metric."""
    found = [r for r in ratios(rows, ours.server) if r.ours is ours and r.metric == metric]
    return min(found, key=lambda ratio: ratio.value, default=None)


def figure(values: Sequence[Figure]) -> Figure:
    """The median of the rounds."""
    seen = [value for value in values if value is not None]
    return median(seen) if seen else None


def _cases(rows: Sequence[Row], server: str) -> Iterator[tuple[Row, list[Row]]]:
    for ours in rows:
        if ours.server == server:
            yield ours, [r for r in rows if not is_ours(r.server) and case_of(r) == case_of(ours)]


def case_of(row: Row) -> tuple[int, str, str, str, str]:
    """What a row shares with the rows that it is compared with."""
    return row.run, row.part, row.model, row.format, row.case


def _rounds(ours: Row, other: Row, metric: str) -> tuple[float, ...]:
    pairs = zip(ours.figures.get(metric, ()), other.figures.get(metric, ()), strict=False)
    more = METRICS[metric].more_is_better
    return tuple(a / b if more else b / a for a, b in pairs if a and b)
