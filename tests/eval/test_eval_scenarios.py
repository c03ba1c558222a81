"""The shipped scenarios: each is passed by its own right replies, and by no others."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_provider import BadRequest
from mlx_provider_eval.client import Reply
from mlx_provider_eval.scenario import MATCHERS, Scenario, digest, read, shipped_scenarios
from mlx_provider_eval.tools import FAULTS, play
from right_replies import right

SHIPPED = read(shipped_scenarios())
Wrong = Callable[[Reply], Reply]


class Parrot:
    """A client whose replies are known; `spoil` changes one of them."""

    def __init__(self, scenario: Scenario, at: int = -1, spoil: Wrong | None = None) -> None:
        self._right = [right(step.expect) for step in scenario.steps]
        self._at, self._spoil = at, spoil
        self.asked: list[list[Mapping[str, Any]]] = []
        self.bodies: list[dict[str, Any]] = []

    def ask(self, messages: list[Mapping[str, Any]], **body: Any) -> Reply:
        step = len(self.asked) % len(self._right)
        self.asked.append([*messages])
        self.bodies.append(body)
        reply = self._right[step]
        return self._spoil(reply) if self._spoil and step == self._at else reply


def names(scenario: Scenario) -> str:
    return scenario.name


@pytest.mark.parametrize("scenario", SHIPPED, ids=names)
def test_every_shipped_scenario_passes_with_right_replies(scenario: Scenario) -> None:
    played = play(Parrot(scenario), scenario)  # type: ignore[arg-type]
    assert played.fault is None, played.fault


def worse(reply: Reply) -> Iterator[tuple[str, Reply]]:
    """What a model may say in its place, with the fault that this is."""
    if not reply.calls:
        yield "no text", replace(reply, text=" \n")
        yield "cut off", replace(reply, finish="length")
        return
    first, *others = reply.calls
    yield "no call", Reply(text="I cannot do that.")
    yield "call in text", Reply(text=f"[{first.name}]")
    yield "unknown tool", replace(reply, calls=(replace(first, name="nobody_has_it"), *others))
    yield "no JSON", replace(reply, calls=(replace(first, arguments="{"), *others))
    yield "extra call", replace(reply, calls=(*reply.calls, first))
    arguments = {**json.loads(first.arguments), "because": "I say so"}
    with_more = replace(first, arguments=json.dumps(arguments))
    yield "invented argument", replace(reply, calls=(with_more, *others))


@pytest.mark.parametrize("scenario", SHIPPED, ids=names)
def test_every_shipped_scenario_fails_with_wrong_replies(scenario: Scenario) -> None:
    for at, step in enumerate(scenario.steps):
        for fault, reply in worse(right(step.expect)):
            client = Parrot(scenario, at, lambda _, wrong=reply: wrong)  # type: ignore[misc]
            played = play(client, scenario)  # type: ignore[arg-type]
            assert played.fault is not None, fault
            assert (played.fault.name, len(played.replies)) == (fault, at + 1)


def test_the_shipped_scenarios_cover_every_kind() -> None:
    kinds = {each.kind for each in SHIPPED}
    assert kinds == {
        *("single", "choice", "parallel", "no_call", "arguments", "turns", "forced"),
        "missing",
    }
    assert len(SHIPPED) >= 60
    assert len(max(SHIPPED, key=lambda each: len(each.tools)).tools) >= 20, "many tools"


def test_the_digest_changes_with_any_check_of_a_scenario() -> None:
    one, *rest = SHIPPED
    assert digest(SHIPPED) == digest(read(shipped_scenarios()))
    other = one.model_copy(update={"parallel": not one.parallel})
    assert digest([other, *rest]) != digest(SHIPPED)


def scenario(**fields: Any) -> Scenario:
    return next(each for each in SHIPPED if all(getattr(each, n) == v for n, v in fields.items()))


def test_each_tool_result_is_sent_with_the_id_of_its_call() -> None:
    played = scenario(kind="turns", id="parallel-results")
    client = Parrot(played)
    assert play(client, played).fault is None  # type: ignore[arg-type]
    results = {m["tool_call_id"]: m["content"] for m in client.asked[1] if m["role"] == "tool"}
    assert results == {"call_0": '{"temperature": 19}', "call_1": '{"temperature": 11}'}
    assert client.asked[1][1]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_a_scenario_sends_its_tool_choice_and_parallel_setting() -> None:
    for name, choice in {
        "required": "required",
        "none": "none",
        "named": {"type": "function", "function": {"name": "get_time"}},
    }.items():
        played = scenario(kind="forced", id=name)
        client = Parrot(played)
        play(client, played)  # type: ignore[arg-type]
        assert client.bodies[0]["tool_choice"] == choice
    single = scenario(kind="parallel", id="one-at-a-time")
    client = Parrot(single)
    play(client, single)  # type: ignore[arg-type]
    assert client.bodies[0]["parallel_tool_calls"] is False


GOOD = """
kind: own
define:
  ring:
    description: Rings.
    parameters: {type: object, properties: {at: {type: string}}, required: [at]}
scenarios:
- id: a
  tools: [ring]
  say: Ring on 2027-01-02.
  expect: {calls: [{ring: {at: 2027-01-02}}]}
"""


def test_a_scenario_file_of_a_user_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(GOOD)
    (found,) = read([path])
    assert found.name == "own/a"
    assert found.steps[0].expect.calls == [{"ring": {"at": "2027-01-02"}}], "no date, but text"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("tools: [ring]", "tools: [rang]", "scenario a: no such tool: rang"),
        ("{ring: {at: 2027-01-02}}", "{get_time: {}}", "get_time: not among its tools"),
        ("at: 2027-01-02", "at: {$is: x}", "no such matcher: $is"),
        ("at: 2027-01-02", "at: {$in: 5}", "$in must have a list"),
        ("expect: {calls", "expect: {text: {}, calls", "either calls, or text"),
        ("  say:", "  sai:", "sai"),
        ("type: object,", "type: objekt,", "parameters"),
        ("id: a", "id: [", "is no YAML"),
        ("scenarios:", "scenes:", "holds no list `scenarios`"),
        ("kind: own\n", "", "kind: Field required"),
    ],
)
def test_a_faulty_file_gives_its_path(tmp_path: Path, before: str, after: str, told: str) -> None:
    path = tmp_path / "own.yaml"
    assert before in GOOD
    path.write_text(GOOD.replace(before, after))
    with pytest.raises(BadRequest) as error:
        read([path])
    assert told in error.value.message
    assert str(path) in error.value.message


def test_the_scenario_file_of_the_guide_is_valid(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    (block,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "house.yaml").write_text(block)
    found, ids = read([tmp_path / "house.yaml"]), ("opens", "asks-back", "tells-the-error")
    assert [each.name for each in found] == [f"house/{name}" for name in ids]
    for each in found:
        assert play(Parrot(each), each).fault is None  # type: ignore[arg-type]


def test_the_guide_names_every_fault_matcher_and_kind_of_scenario() -> None:
    page = Path(__file__).parents[2] / "docs" / "evaluation.md"
    told = page.read_text(encoding="utf-8")
    named = {*FAULTS, *MATCHERS, *(each.kind for each in SHIPPED)}
    assert {name for name in named if f"`{name}`" not in told} == set()
    assert f"{len(SHIPPED)} short English scenarios" in told


def test_a_missing_scenario_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"none\.yaml cannot be read"):
        read([tmp_path / "none.yaml"])
