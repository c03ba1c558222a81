"""The result for people: differences, then every figure, then how to repeat it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from .plan import PARTS
from .result import Result
from .rows import METRICS, Row
from .verdict import (
    Ratio,
    answers_wrongly,
    best,
    figure,
    is_ours,
    not_as_alone,
    not_faster,
    ratios,
    refusals,
    without_figure,
    without_rival,
)

TITLES = {
    "answers": "Answers under concurrency",
    "speed": "Speed by the number of streams",
    "reuse": "Prompts and images seen before",
    "stall": "While a long prompt arrives",
}
NOWHERE = "Nowhere in this run."


def report(result: Result) -> str:
    lines = ["# mlx-provider beside other servers", "", *_machine(result), ""]
    lines += ["## Where we are not faster", "", *_not_faster(result), ""]
    lines += ["## Where answers in company are not those alone", "", *_not_as_alone(result), ""]
    lines += ["## Who refused, died or was not there", "", *_trouble(result), ""]
    for part in PARTS:
        rows = [row for row in result.rows if row.part == part]
        if rows:
            lines += [f"## {TITLES[part]}", "", *_part(rows), ""]
    return "\n".join([*lines, "## How to repeat it", "", *_repeat(result), ""])


def _machine(result: Result) -> Iterator[str]:
    summary = list(dict.fromkeys(_where(run) for run in result.runs))
    if len(summary) > 1:
        yield "**These runs are of different machines or versions:**"
        yield ""
    yield from (f"- {each}" for each in summary)


def _where(run: dict[str, Any]) -> str:
    machine, found = run["machine"], run["versions"]
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB"
    summary = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"{where}, {machine['system']}, MLX on `{machine['device']}`; {summary}"


def _not_faster(result: Result) -> list[str]:
    """Never empty: without another server, a line says so."""
    found, compared = not_faster(result.rows), sum(1 for _ in ratios(result.rows))
    lines = [f"- {_case(row)}: {refused(row)}" for row in refusals(result.rows)]
    lines += [
        f"- {_case(row)}: {METRICS[metric].title}: no figure of ours"
        for row, metric in without_figure(result.rows)
    ]
    lines += [f"- {_sentence(ratio)}{_but(result, ratio.other)}" for ratio in found]
    if not lines:
        lines = [NOWHERE] if compared else ["There was no other server's figure to compare with."]
    lines += ["", f"{compared} figures were compared; {len(found)} are listed."]
    alone = [_case(row) for row in without_rival(result.rows)]
    if alone and compared:
        lines += ["", f"No other server has a figure for: {'; '.join(alone)}."]
    return lines


def _but(result: Result, other: Row) -> str:
    wrong = answers_wrongly(result.rows, other)
    return "; its answers in company are not those alone" if wrong else ""


def _sentence(ratio: Ratio) -> str:
    ours, theirs = (figure(row.figures[ratio.metric]) for row in (ratio.ours, ratio.other))
    metric = METRICS[ratio.metric]
    words = f"{_case(ratio.ours)}: {metric.title} **{ratio.value:.2f} ×** {ratio.other.server}'s"
    words += f" ({_number(ours)} against {_number(theirs)} {metric.unit}"
    if len(ratio.rounds) > 1:
        words += f"; rounds {min(ratio.rounds):.2f} to {max(ratio.rounds):.2f}"
    words += ", which do not agree)" if ratio.unsure else ")"
    return words


def _not_as_alone(result: Result) -> list[str]:
    compared = [row for row in result.rows if row.compared]
    if not compared:
        return ["No answers were compared."]
    lines = [
        f"- {row.server}, {_case(row)}: {row.equal} of {row.compared} equal"
        for row in not_as_alone(result.rows)
    ]
    return lines or [NOWHERE]


def _trouble(result: Result) -> list[str]:
    lines = [f"- {a.server} with {a.model}, {a.format}: not there: {a.why}" for a in result.absent]
    lines += [f"- {d.server} with {d.model}, {d.format}: {d.why}" for d in result.deaths]
    lines += [f"- {row.server}, {_case(row)}: {refused(row)}" for row in result.rows if row.refused]
    return lines or ["Nobody."]


def refused(row: Row) -> str:
    """`3 of 16: reason`."""
    return f"refused {row.refused} of {row.asked}: {_line(row.reason)[:160]}"


def _part(rows: Sequence[Row]) -> Iterator[str]:
    """A table for each model, in each of its formats and runs."""
    for head, group in groupby(rows, key=lambda row: (row.run, row.model, row.format)):
        yield from [f"### {head[1]}, {head[2]}{f' (run {head[0] + 1})' if head[0] else ''}", ""]
        yield from [*_table(list(group)), ""]


def _table(rows: Sequence[Row]) -> Iterator[str]:
    metrics = [name for name in METRICS if any(name in row.figures for row in rows)]
    notes = list(dict.fromkeys(name for row in rows for name in row.notes))
    head = ["case", "server"]
    for name in metrics:
        head += [f"{METRICS[name].title}, {METRICS[name].unit}", "× best other"]
    yield _cells([*head, "as alone", "refused", *notes])
    yield _cells(["---"] * (len(head) + 2 + len(notes)))
    for row in rows:
        cells = [row.case, row.server]
        for name in metrics:
            cells += [_number(figure(row.figures.get(name, ()))), _ratio(rows, row, name)]
        cells += [f"{row.equal}/{row.compared}" if row.compared else "-"]
        cells += [f"{row.refused}/{row.asked}" if row.refused else "-"]
        yield _cells([*cells, *(row.notes.get(name, "-") for name in notes)])


def _ratio(rows: Sequence[Row], row: Row, metric: str) -> str:
    ratio = best(rows, row, metric) if is_ours(row.server) else None
    return "" if ratio is None else f"{ratio.value:.2f}"


def _repeat(result: Result) -> Iterator[str]:
    for at, run in enumerate(result.runs):
        busy = f"load {run['machine']['load_average']} at its start"
        yield f"Run {at + 1}, {run['started']}, {run['seconds']} s, {busy}:"
        yield from ["", "```text", run["command"], "```", ""]
        yield from [*(f"- {name}: {where}" for name, where in run["servers"].items()), ""]
    yield "Ratios are medians of the rounds of one run, in which the servers take turns; above 1 is"
    yield "in our favour, for times as for rates. Figures of different runs are not to be compared."


def _case(row: Row) -> str:
    return f"{row.model}, {row.format}, {row.case}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _cells(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"
