"""`mlx-provider eval tools`: play scenarios through the gateway and count faults of the replies.
A scenario passes if no reply has a fault; it ends at the first one."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jsonschema  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable
from rich.table import Table
from rich.text import Text as Plain

from mlx_provider import BadRequest

from .client import Client, Reply, ReplyCall
from .scenario import Call, Expected, Scenario, Step, Text, Tool, differences, digest, orders
from .subjects import GREETING, LoadedSubject, Progress, Result

FAULTS = (  # names; docs/evaluation.md explains them
    *("request failed", "cut off", "no call", "call in text", "needless call", "missing call"),
    *("extra call", "unknown tool", "wrong tool", "no JSON", "against the schema"),
    *("invented argument", "wrong argument", "no text", "wrong text"),
)
# of several orders of calls, the report is about the one that comes closest
CLOSEST_FIRST = ("invented argument", "wrong argument", "wrong tool")
NO_RESULT = "error: this tool gives nothing here"


@dataclass(frozen=True)
class Fault:
    """What is wrong with a reply."""

    name: str  # one of `FAULTS`
    reason: str


@dataclass(frozen=True)
class Run:
    """A scenario that was played; `fault` is `None` if it passed."""

    fault: Fault | None
    transcript: Sequence[Mapping[str, Any]]  # all messages, and the reply with the fault
    replies: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCalls:
    """The plan of `eval tools`. `body`: further fields of every request."""

    scenarios: Sequence[Scenario]
    max_tokens: int = 2048
    body: Mapping[str, Any] = field(default_factory=dict)
    name: ClassVar[str] = "tools"

    def as_json(self) -> Result:
        which = {"scenarios": len(self.scenarios), "scenarios_digest": digest(self.scenarios)}
        return {**which, "max_tokens": self.max_tokens, "body": dict(self.body)}

    def measure(self, loaded: LoadedSubject, progress: Progress) -> Result:
        """The result of one subject, with each failed scenario, or why it was `skipped`."""
        if not knows_tools(loaded):
            why = "its chat template shows no tools: choose a model that was trained to call them"
            return {**loaded.as_json(), "skipped": why}
        cases = []
        with closing(Client(loaded, self.max_tokens, self.body)) as client:
            for scenario in self.scenarios:
                progress(scenario.name)
                cases.append(_case(scenario, play(client, scenario)))
        asked = Counter(case["kind"] for case in cases)
        passed = Counter(case["kind"] for case in cases if not case["fault"])
        return {
            **loaded.as_json(),
            "passed": passed.total(),
            "asked": len(cases),
            "kinds": {kind: [passed[kind], count] for kind, count in asked.items()},
            "faults": Counter(case["fault"] for case in cases if case["fault"]),
            "cases": cases,
        }

    def report(self, found: Sequence[Result]) -> Table:
        """A table with a column for each subject: passed scenarios by kind, and faults."""
        table = Table("passed, by kind", title="tool calls", title_justify="left")
        for result in found:
            table.add_column(Plain(result["label"]), overflow="fold")
        for kind in found[0]["kinds"]:
            table.add_row(kind, *("{}/{}".format(*result["kinds"][kind]) for result in found))
        table.add_row("all", *(f"{result['passed']}/{result['asked']}" for result in found))
        table.add_section()
        for name in FAULTS:
            counts = [result["faults"].get(name, 0) for result in found]
            if any(counts):
                table.add_row(f"fault: {name}", *map(str, counts))
        return table


def _case(scenario: Scenario, run: Run) -> Result:
    case = {"name": scenario.name, "kind": scenario.kind}
    if run.fault is None:
        return {**case, "fault": ""}
    fault = {"fault": run.fault.name, "why": run.fault.reason, "step": len(run.replies)}
    return {**case, **fault, "transcript": list(run.transcript)}


def knows_tools(loaded: LoadedSubject) -> bool:
    """Whether the prompt gets longer with a tool, so that its chat template shows tools."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    return loaded.count(GREETING, tools=tools) > loaded.count(GREETING)


def play(client: Client, scenario: Scenario) -> Run:
    """Ask step by step until a reply has a fault. Raises `EngineUnavailable` if the proxy ended."""
    messages: list[dict[str, Any]] = [*scenario.history]
    if scenario.system is not None:
        messages.insert(0, {"role": "system", "content": scenario.system})
    body: dict[str, Any] = {"tools": scenario.definitions(), "tool_choice": scenario.tool_choice()}
    if not scenario.parallel:
        body["parallel_tool_calls"] = False
    reply, replies = Reply(), []
    for step in scenario.steps:
        messages += _messages(step, reply)
        reply = client.ask(messages, **body)
        replies.append(reply.as_json())
        if fault := find_fault(reply, step.expect, scenario.tools):
            messages.append({"reply": replies[-1]})
            return Run(fault, messages, replies)
        messages.append(reply.message())
    return Run(None, messages, replies)


def _messages(step: Step, before: Reply) -> Iterator[dict[str, Any]]:
    """Results for the calls of the reply before, then the user's message."""
    for call in before.calls:
        content = step.results.get(call.name, NO_RESULT)
        if not isinstance(content, str):
            values = [str(value) for value in json.loads(call.arguments).values()]
            content = next((text for v, text in content.items() if v in values), NO_RESULT)
        yield {"role": "tool", "tool_call_id": call.id, "content": content}
    if step.say is not None:
        yield {"role": "user", "content": step.say}


def find_fault(reply: Reply, expected: Expected, tools: Mapping[str, Tool]) -> Fault | None:
    """The first fault of a reply; `None`: it is as expected."""
    if reply.failure:
        return Fault("request failed", reply.failure)
    if reply.finish == "length":
        return Fault("cut off", f"after {reply.completion_tokens} tokens")
    if expected.text is not None:
        return _text_fault(reply, expected.text)
    if not reply.calls:
        return _missing_call_fault(reply, expected.calls)
    return _calls_fault(reply.calls, expected.calls, tools)


def _text_fault(reply: Reply, wanted: Text) -> Fault | None:
    if reply.calls:
        return Fault("needless call", "; ".join(map(_show, reply.calls)))
    if not reply.text.strip():
        return Fault("no text", "the reply is empty")
    said = reply.text.casefold()
    for text in wanted.has:
        options = text if isinstance(text, list) else [text]
        if not any(option.casefold() in said for option in options):
            return Fault("wrong text", f"it does not hold {' or '.join(map(repr, options))}")
    barred = [text for text in wanted.lacks if text.casefold() in said]
    return Fault("wrong text", f"it holds {barred[0]!r}") if barred else None


def _missing_call_fault(reply: Reply, wanted: Sequence[Call]) -> Fault:
    names = [name for call in wanted for name in call]
    if not reply.text.strip():
        return Fault("no text", f"the reply is empty; wanted a call of {names[0]}")
    found = next((name for name in names if name in reply.text), None)
    if found is not None:
        return Fault("call in text", f"{found} stands in the text, and no call was read")
    return Fault("no call", f"wanted a call of {names[0]}")


def _calls_fault(
    made: Sequence[ReplyCall], wanted: Sequence[Call], tools: Mapping[str, Tool]
) -> Fault | None:
    if fault := next(filter(None, (_call_fault(call, tools) for call in made)), None):
        return fault
    if len(made) != len(wanted):
        name = "missing call" if len(made) < len(wanted) else "extra call"
        return Fault(name, f"{len(made)} of {len(wanted)}: {'; '.join(map(_show, made))}")
    faults = [_compare_calls(made, order) for order in orders(wanted)]
    return min(faults, key=lambda fault: CLOSEST_FIRST.index(fault.name) if fault else -1)


def _call_fault(call: ReplyCall, tools: Mapping[str, Tool]) -> Fault | None:
    if call.name not in tools:
        return Fault("unknown tool", f"{call.name!r}; there are {', '.join(tools)}")
    arguments = _arguments(call)
    if arguments is None:
        return Fault("no JSON", _show(call))
    try:
        jsonschema.validate(arguments, tools[call.name].parameters)
    except jsonschema.ValidationError as error:
        return Fault("against the schema", f"{_show(call)}: {error.message}")
    except Unresolvable as error:
        raise BadRequest(f"the schema of {call.name}: {error}", param="--scenarios") from None
    return None


def _compare_calls(made: Sequence[ReplyCall], wanted: Sequence[Call]) -> Fault | None:
    for call, expected in zip(made, wanted, strict=True):
        ((name, arguments),) = expected.items()
        if call.name != name:
            return Fault("wrong tool", f"{_show(call)}, not {name}")
        given = _arguments(call) or {}
        if found := differences(arguments, given):
            # are the arguments right without those that were not asked for?
            rest = {argument: given[argument] for argument in given if argument in arguments}
            kind = "wrong" if differences(arguments, rest) else "invented"
            return Fault(f"{kind} argument", f"{call.name}: {'; '.join(found)}")
    return None


def _arguments(call: ReplyCall) -> dict[str, Any] | None:
    """The arguments as an object; `None`: they are none."""
    try:
        found = json.loads(call.arguments)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _show(call: ReplyCall) -> str:
    return f"{call.name}({call.arguments[:200]})"
