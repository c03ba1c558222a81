"""The place of a figure: part, model, case, server."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peers import same
from servers import Answer

from .plan import Subject


@dataclass(frozen=True)
class Metric:
    title: str
    unit: str
    more_is_better: bool


METRICS = {
    "throughput": Metric("throughput", "tokens/s", True),
    "first_token": Metric("time to first token", "s", False),
    "pace": Metric("pace of a stream", "tokens/s", True),
    "longest_gap": Metric("longest gap of a stream", "s", False),
    "newcomer": Metric("first token of the long prompt", "s", False),
}
Figure = float | None


@dataclass
class Row:
    """The result of one server in one case of one part.

    `figures`: by metric, one for each round; `None`: the round has none. Figures of one round have
    the same place in the rows of all servers.
    """

    part: str
    model: str
    format: str
    case: str
    server: str
    run: int = 0
    """Which of the result's runs it is from."""
    asked: int = 0
    refused: int = 0
    reason: str = ""
    """Of the last request that was refused."""
    compared: int = 0
    """Answers that were held against what the server says to the same request alone."""
    equal: int = 0
    figures: dict[str, list[Figure]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def count(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            self.asked += 1
            if answer.failure:
                self.refused += 1
                self.reason = answer.failure

    def hold(self, answers: Sequence[Answer], alone: Sequence[Answer]) -> None:
        """Answers against those that the same server gives to the same requests alone.

        A refused request counts as refused, not as a wrong answer.
        """
        for answer, truth in zip(answers, alone, strict=True):
            if not answer.failure and not truth.failure:
                self.compared += 1
                self.equal += same(answer, truth.text)

    def add(self, metric: str, value: Figure) -> None:
        self.figures.setdefault(metric, []).append(value)


class Rows:
    """Those of one part and model, made when they are first asked for, in that order."""

    def __init__(self, part: str, subject: Subject) -> None:
        self._head = part, subject.model, subject.format
        self._rows: dict[tuple[str, str], Row] = {}

    def __call__(self, case: str, server: str) -> Row:
        key = case, server
        if key not in self._rows:
            self._rows[key] = Row(*self._head, case, server)
        return self._rows[key]

    def all(self) -> list[Row]:
        """Rows by case, then in the order of their first request."""
        cases = list(dict.fromkeys(case for case, _ in self._rows))
        return [row for case in cases for (own, _), row in self._rows.items() if own == case]
