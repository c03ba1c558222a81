"""`mlx-provider eval tools`: scenarios with tools through the gateway, counted by kind.

Decoding is greedy, so that a run can be repeated. `repeat` runs each scenario several times, up to
`at_once` at the same time. A scenario passes if every reply is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from .asking import Client
from .conditions import conditions, of_subject
from .playing import Played, play
from .scenario import Scenario, digest
from .stage import HELLO, Staged

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    scenarios: Sequence[Scenario]
    repeat: int = 1
    at_once: int = 1
    max_tokens: int = 2048
    said: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request, such as `chat_template_kwargs`."""


def measured(plan: Plan, staged: Staged, done: Callable[[], None]) -> Result:
    """One subject's result; JSON-able. `done` is called after each run of a scenario.

    Raises `EngineUnavailable` if the gateway has ended.
    """
    if why := knows_tools(staged):
        return {**of_subject(staged), "skipped": why}
    runs = _runs(plan, staged, done)
    cases = [_case(scenario, runs[scenario.name]) for scenario in plan.scenarios]
    return {**of_subject(staged), **counted(cases), "cases": cases}


def whole(plan: Plan, subjects: Sequence[Result]) -> Result:
    return {
        "eval": "tools",
        **conditions(),
        "scenarios": len(plan.scenarios),
        "scenarios_digest": digest(plan.scenarios),
        "repeat": plan.repeat,
        "at_once": plan.at_once,
        "max_tokens": plan.max_tokens,
        "said": dict(plan.said),
        "subjects": list(subjects),
    }


def counted(cases: Sequence[Result]) -> Result:
    """Counts by kind and in total, faults by name, and the scenarios with equal replies each
    time."""
    kinds = list(dict.fromkeys(case["kind"] for case in cases))
    of_kind = {kind: [case for case in cases if case["kind"] == kind] for kind in kinds}
    return {
        "passed": _passed(cases),
        "asked": len(cases),
        "kinds": {kind: [_passed(found), len(found)] for kind, found in of_kind.items()},
        "faults": dict(Counter(case["fault"] for case in cases if case["fault"])),
        "unsteady": [case["name"] for case in cases if not case["steady"]],
    }


def _passed(cases: Sequence[Result]) -> int:
    return sum(case["passed"] == case["runs"] for case in cases)


def _runs(plan: Plan, staged: Staged, done: Callable[[], None]) -> dict[str, list[Played]]:
    """All runs of each scenario, by name."""
    found: dict[str, list[Played]] = {each.name: [] for each in plan.scenarios}
    with ExitStack() as ending:
        client = Client(staged, plan.max_tokens, plan.said)
        pool = ThreadPoolExecutor(plan.at_once, thread_name_prefix="scenario")
        ending.callback(client.close)
        ending.callback(pool.shutdown, wait=False, cancel_futures=True)
        asked = [
            (scenario.name, pool.submit(play, client, scenario))
            for _ in range(plan.repeat)
            for scenario in plan.scenarios
        ]
        for name, future in asked:
            found[name].append(future.result())
            done()
    return found


def _case(scenario: Scenario, runs: Sequence[Played]) -> Result:
    """The result of a scenario, with the first run that failed."""
    failed = next((run for run in runs if not run.passed), None)
    steady = all(run.same_as(runs[0]) for run in runs)
    case: Result = {
        "name": scenario.name,
        "kind": scenario.kind,
        "runs": len(runs),
        "passed": sum(run.passed for run in runs),
        "steady": steady,
        "fault": "",
    }
    if failed is not None and failed.fault is not None:
        case |= {
            "fault": failed.fault.name,
            "why": failed.fault.reason,
            "step": failed.step,
            "transcript": list(failed.transcript),
        }
    return case


def knows_tools(staged: Staged) -> str:
    """Why the scenarios are not useful for this model; empty: they are.

    If a template shows no tools, the model does not know them.
    """
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    without = staged.engine.count(staged.request(HELLO))
    if staged.engine.count(staged.request(HELLO, tools=tools)) > without:
        return ""
    return (
        "its chat template shows no tools, so that it cannot know of them: "
        "choose a model that was trained to call tools"
    )
