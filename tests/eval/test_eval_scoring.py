"""Each rule by which a reply is judged, going right and going wrong."""

import json
from typing import Any

import pytest

from mlx_provider_eval.client import Reply, ReplyCall
from mlx_provider_eval.scenario import Expected, Text, Tool, matches
from mlx_provider_eval.tools import FAULTS, find_fault

TOOLS = {
    "light": Tool(
        description="Light.",
        parameters={
            "type": "object",
            "properties": {
                "room": {"enum": ["hall", "attic"]},
                "level": {"type": "integer"},
                "why": {"type": "string"},
            },
            "required": ["room"],
        },
    ),
    "door": Tool(description="Door.", parameters={"type": "object"}),
}


def light(**arguments: Any) -> ReplyCall:
    return ReplyCall("1", "light", json.dumps(arguments))


def said(*calls: ReplyCall, text: str = "", **more: Any) -> Reply:
    return Reply(text=text, calls=calls, finish="tool_calls" if calls else "stop", **more)


HALL = Expected(calls=[{"light": {"room": "hall"}}])
BOTH = Expected(calls=[{"light": {"room": "hall"}}, {"light": {"room": "attic"}}])
WORDS = Expected(text=Text(has=["four", ["door", "gate"]], lacks=["window"]))


@pytest.mark.parametrize(
    ("reply", "expected", "fault"),
    [
        (said(light(room="hall")), HALL, None),
        (said(light(room="hall"), text="I switch it on."), HALL, None),
        (said(light(room="attic"), light(room="hall")), BOTH, None),
        (said(text="FOUR gates"), WORDS, None),
        (said(failure="HTTP 400: no"), HALL, "request failed"),
        (Reply(text="light" * 9, finish="length", completion_tokens=9), HALL, "cut off"),
        (said(text="On it is."), HALL, "no call"),
        (said(text='<call>light{"room": "hall"}'), HALL, "call in text"),
        (said(), HALL, "no text"),
        (said(light(room="hall")), WORDS, "needless call"),
        (said(light(room="hall")), BOTH, "missing call"),
        (said(light(room="hall"), light(room="attic")), HALL, "extra call"),
        (said(ReplyCall("1", "lamp", "{}")), HALL, "unknown tool"),
        (said(ReplyCall("1", "door", "{}")), HALL, "wrong tool"),
        (said(ReplyCall("1", "light", '{"room"')), HALL, "no JSON"),
        (said(ReplyCall("1", "light", '["hall"]')), HALL, "no JSON"),
        (said(light(room="cellar")), HALL, "against the schema"),
        (said(light(level=1)), HALL, "against the schema"),
        (said(light(room="hall", level=3)), HALL, "invented argument"),
        (said(light(room="attic")), HALL, "wrong argument"),
        (said(light(room="hall"), light(room="hall")), BOTH, "wrong argument"),
        (said(), WORDS, "no text"),
        (said(text="four windows and a door"), WORDS, "wrong text"),
        (said(text="four"), WORDS, "wrong text"),
    ],
)
def test_every_wrong_reply_has_a_fault(reply: Reply, expected: Expected, fault: str | None) -> None:
    found = find_fault(reply, expected, TOOLS)
    assert (found.name if found else None) == fault
    assert found is None or (found.name in FAULTS and found.reason)


SOURCE = "class A:\n    def b(self): ...\n\nasync def c(): ...\n"


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (5, [5, 5.0], ["5", 5.1, None, True]),
        (True, [True], [1, "true"]),
        (1, [1], [True]),
        (None, [None], [0, ""]),
        ("a", ["a"], ["A", "a ", ["a"]]),
        ([1, {"$has": "x"}], [[1, "axb"]], [[1], ["axb", 1], "1x"]),
        ({"a": {"b": 1}}, [{"a": {"b": 1}}], [{"a": {"b": 2}}, {"a": {}}, {"a": {"b": 1}, "c": 1}]),
        ({"$in": [1, {"$has": "x"}]}, [1, "xx"], [2, "y"]),
        ({"$has": "Or"}, ["doors", "OR"], ["d", 7]),
        ({"$like": "Good night"}, ["good  night.", "Good Night!"], ["goodnight", "good"]),
        ({"$lines": "a\nb"}, ["a\nb\n", " a\nb"], ["a b", "a\n b"]),
        ({"$set": [1, {"x": 2}]}, [[1, {"x": 2}], [{"x": 2}, 1]], [[1], [1, 1], {"x": 2}]),
        ({"a": {"$maybe": 1}}, [{}, {"a": 1}], [{"a": 2}]),
        ({"a": {"$any": True}}, [{"a": None}, {"a": 3}], [{}]),
        ({"$python": ["A", "c"]}, [SOURCE], ["class A: pass", "def c(:", SOURCE[6:], 3, "\0"]),
        ({"$python": ["b"]}, ["def b(): exit()"], [SOURCE]),
    ],
)
def test_a_matcher_accepts_only_right_ones(wanted: Any, right: list[Any], wrong: list[Any]) -> None:
    assert all(matches(wanted, each) for each in right)
    assert [each for each in wrong if matches(wanted, each)] == []


def test_code_too_deep_to_compile_does_not_match_and_does_not_raise() -> None:
    assert not matches({"$python": ["f"]}, "(" * 100_000)
    assert not matches({"$python": ["f"]}, "-" * 100_000 + "1")
