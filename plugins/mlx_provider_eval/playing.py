"""Runs a scenario turn by turn, up to its end or its first fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .asking import Client, Made, Reply
from .scenario import Scenario, Step
from .scoring import Fault, judged

NO_RESULT = "error: this tool gives nothing here"
"""To a call for which the scenario has no result."""


@dataclass(frozen=True)
class Played:
    """One run of a scenario."""

    fault: Fault | None
    step: int
    """The number of the step with the fault, or of the last step. The first is 1."""
    transcript: tuple[Mapping[str, Any], ...]
    """All messages. A wrong reply is unchanged."""
    replies: tuple[Reply, ...]

    @property
    def passed(self) -> bool:
        return self.fault is None

    def same_as(self, other: Played) -> bool:
        """Whether the model gave the same replies."""
        if len(self.replies) != len(other.replies):
            return False
        return all(map(Reply.same_as, self.replies, other.replies))


def play(client: Client, scenario: Scenario) -> Played:
    """Raises `EngineUnavailable` if the gateway has ended."""
    streamed = _played(client, scenario, stream=True)
    if scenario.stream != "both" or not streamed.passed:
        return streamed
    whole = _played(client, scenario, stream=False)
    if not whole.passed or whole.same_as(streamed):
        return whole
    both = " and ".join(
        json.dumps(p.replies[-1].encoded(), ensure_ascii=False) for p in (streamed, whole)
    )
    fault = Fault("differs by stream", both)
    return Played(fault, whole.step, whole.transcript, whole.replies)


def _played(client: Client, scenario: Scenario, *, stream: bool) -> Played:
    messages: list[dict[str, Any]] = [*scenario.history]
    if scenario.system is not None:
        messages.insert(0, {"role": "system", "content": scenario.system})
    replies: list[Reply] = []
    fault = None
    for step in scenario.steps:
        messages += _asked(step, replies[-1] if replies else Reply())
        reply = client.ask(messages, stream=stream, **_offered(scenario))
        replies.append(reply)
        fault = judged(reply, step.expect, scenario.tools)
        if fault is not None:
            break
        messages.append(reply.message())
    if fault is not None:
        messages.append({"reply": replies[-1].encoded()})
    return Played(fault, len(replies), tuple(messages), tuple(replies))


def _offered(scenario: Scenario) -> dict[str, Any]:
    body: dict[str, Any] = {"tools": scenario.definitions(), "tool_choice": scenario.tool_choice()}
    return body if scenario.parallel else {**body, "parallel_tool_calls": False}


def _asked(step: Step, before: Reply) -> Iterator[dict[str, Any]]:
    """Results of the calls in the reply before, then the user's text."""
    for call in before.calls:
        content = _result(call, step.results.get(call.name, NO_RESULT))
        yield {"role": "tool", "tool_call_id": call.id, "content": content}
    if step.say is not None:
        yield {"role": "user", "content": step.say}


def _result(call: Made, results: str | Mapping[str, str]) -> str:
    if isinstance(results, str):
        return results
    values = [str(value) for value in json.loads(call.arguments).values()]
    return next((text for value, text in results.items() if value in values), NO_RESULT)
