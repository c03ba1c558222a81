"""The report of `eval tools`: passes by kind, faults, and an example of each failure."""

from __future__ import annotations

from typing import Any

from .report import Result, Table, measured_of
from .scoring import FAULTS


def tables(result: Result) -> list[Table]:
    """Tables by kind and by fault, a column for each subject."""
    found = measured_of(result)
    kinds = list(dict.fromkeys(kind for each in found for kind in each["kinds"]))
    faults = [name for name in FAULTS if any(name in each["faults"] for each in found)]
    labels = [each["label"] for each in found]
    by_kind = [[kind, *(_of(each["kinds"].get(kind)) for each in found)] for kind in kinds]
    by_kind.append(["all", *(_of([each["passed"], each["asked"]]) for each in found)])
    if result["repeat"] > 1:
        by_kind.append(
            ["other words when repeated", *(str(len(each["unsteady"])) for each in found)]
        )
    by_fault = [[name, *(str(each["faults"].get(name, 0)) for each in found)] for name in faults]
    made = [Table("passed, by kind", ["kind", *labels], by_kind)]
    return made + ([Table("faults", ["fault", *labels], by_fault)] if by_fault else [])


def _of(pair: Any) -> str:
    return "-" if pair is None else f"{pair[0]}/{pair[1]}"


def guidance(result: Result) -> list[str]:
    """Conclusions from the counts, for each subject."""
    found = sorted(measured_of(result), key=lambda each: -each["passed"])
    lines = []
    for each in found:
        weak = [kind for kind, (passed, asked) in each["kinds"].items() if passed < asked]
        weak.sort(key=lambda kind: each["kinds"][kind][0] / each["kinds"][kind][1])
        said = f"`{each['label']}`: {each['passed']} of {each['asked']}"
        if weak:
            said += f"; weakest in {', '.join(weak[:3])}"
        if count := each["faults"].get("call in text"):
            said += (
                f"; replies that name their tool in words: {count} (if those are calls, another "
                "`tool_parser` may read them)"
            )
        if count := each["faults"].get("cut off"):
            said += f"; replies that were cut off: {count} (raise `--max-tokens`)"
        lines.append(said)
    if len(found) > 1 and found[0]["passed"] == found[1]["passed"]:
        lines.append("The best have passed as many: of them the faults alone tell.")
    return lines
