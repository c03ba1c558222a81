"""The recorded turns of agents that the benchmark replays, and what it reckons for a pass."""

from __future__ import annotations

import pytest
from jsonschema import validate

from agent_turn import HOST, PRICED
from recorded_agents import sessions
from watched_passes import Pass


@pytest.mark.parametrize("name", ["OpenCode", "Claude Code", "Codex"])
def test_each_recorded_call_fits_a_tool_of_its_session(name: str) -> None:
    session = sessions()[name]
    schemas = {f["name"]: f["parameters"] for f in (t["function"] for t in session.tools)}
    for call in session.calls:
        validate(call.arguments, schemas[call.name])
    assert len(session.calls) == len(session.results) > 20


@pytest.mark.parametrize("device", PRICED.values(), ids=PRICED)
def test_a_pass_that_waits_for_the_host_takes_longer(device) -> None:
    ahead, waited = (Pass(4, waited, 3, "MTP") for waited in (False, True))
    assert waited.seconds(device, 32_000) == pytest.approx(ahead.seconds(device, 32_000) + HOST)
    assert Pass(4, False).seconds(device, 32_000) < ahead.seconds(device, 32_000)
