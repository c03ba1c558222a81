"""The report of `eval needle`: hits by length and depth, and the length of the first miss."""

from __future__ import annotations

from itertools import groupby

from .report import Result, Table, measured_of


def tables(result: Result) -> list[Table]:
    """A table for each subject: a row for each length, a column for each depth."""
    return [_table(each) for each in measured_of(result)]


def _table(subject: Result) -> Table:
    rows = []
    depths = [cell["depth"] for cell in _rows(subject)[0]]
    for row in _rows(subject):
        tokens = max(cell["tokens"] for cell in row)
        computed = tokens - max(cell["skipped"] for cell in row)
        sparse = [f"{computed:,}"] if _is_sparse(subject) else []
        rows.append([f"{tokens:,}", *sparse, *map(_shown, row)])
    head = ["tokens", *(["computed"] if _is_sparse(subject) else []), *(f"{d} %" for d in depths)]
    return Table(f"{subject['label']} ({subject['haystack']}): found, by depth", head, rows)


def _is_sparse(subject: Result) -> bool:
    return any(cell["skipped"] for cell in subject["cells"])


def _shown(cell: Result) -> str:
    score = f"{cell['found']}/{cell['asked']}"
    return f"{score}, {cell['failed']} failed" if cell["failed"] else score


def _rows(subject: Result) -> list[list[Result]]:
    return [list(row) for _, row in groupby(subject["cells"], key=lambda cell: cell["length"])]


def guidance(result: Result) -> list[str]:
    """The length up to which each found everything, and the effect of options."""
    found = measured_of(result)
    lines = [_reach(each) for each in found]
    lines += [_never_thinned(each) for each in found if _never_thinned(each)]
    for number, each in enumerate(found):
        first = next(other for other in found if other["model"] == each["model"])
        if first is not each and number:
            lines.append(_against(each, first))
    return lines


def _reach(subject: Result) -> str:
    reached = 0
    for row in _rows(subject):
        if missing := [cell for cell in row if cell["found"] < cell["asked"]]:
            where = ", ".join(f"{cell['depth']} %" for cell in missing)
            upto = f"everything found up to {reached:,} tokens" if reached else "nothing is sure"
            tokens = max(cell["tokens"] for cell in row)
            return f"`{subject['label']}`: {upto}; at {tokens:,} it misses at depth {where}"
        reached = max(cell["tokens"] for cell in row)
    return (
        f"`{subject['label']}`: everything found up to {reached:,} tokens, the longest that was "
        f"asked (limited by {subject['limited_by']})"
    )


def _never_thinned(subject: Result) -> str:
    if "sparse_prefill" not in subject["options"] or _is_sparse(subject):
        return ""
    return (
        f"`{subject['label']}`: no prompt was thinned out, so this says nothing of sparse_prefill: "
        "it is for prompts from 8192 tokens on"
    )


def _against(subject: Result, first: Result) -> str:
    """Compare another option of a model with the first one."""
    cells = {(cell["length"], cell["depth"]): cell["found"] for cell in first["cells"]}
    shared = [cell for cell in subject["cells"] if (cell["length"], cell["depth"]) in cells]
    gained = sum(max(0, c["found"] - cells[c["length"], c["depth"]]) for c in shared)
    lost = sum(max(0, cells[c["length"], c["depth"]] - c["found"]) for c in shared)
    asked = sum(cell["asked"] for cell in shared)
    return (
        f"`{subject['label']}` beside `{first['label']}`, of {asked} asked of both: "
        f"{lost} found no more, {gained} found besides"
    )
