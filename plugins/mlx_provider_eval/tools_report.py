"""The report of `eval tools`: passes by kind, faults, and an example of each failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .report import Result, Table, fenced, measured_of, surroundings
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


def markdown(result: Result) -> str:
    parts = ["# Tool calls", surroundings(result)]
    parts.append(
        f"{result['scenarios']} scenarios (digest `{result['scenarios_digest']}`), each "
        f"{result['repeat']} times, {result['at_once']} at once, greedy, at most "
        f"{result['max_tokens']} tokens a reply."
    )
    parts += [f"## {table.title.capitalize()}\n\n{table.markdown()}" for table in tables(result)]
    parts.append("\n".join(f"- {line}" for line in guidance(result)))
    parts += _failures(result)
    return "\n\n".join(filter(None, parts)) + "\n"


def _failures(result: Result) -> Iterator[str]:
    for subject in measured_of(result):
        failed = [case for case in subject["cases"] if case["fault"]]
        if failed:
            yield f"## Failures of {subject['label']}"
        for case in failed:
            yield (
                f"### {case['name']}: {case['fault']}\n\nStep {case['step']}, "
                f"{case['passed']} of {case['runs']} runs passed. {case['why']}"
            )
            yield fenced(case["transcript"])
