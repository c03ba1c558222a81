"""UI-TARS: labelled thoughts, and actions as calls."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import REASONING_PARSERS, TOOL_PARSERS, WholeReply, read_chunks, tool

CALLS, THOUGHTS = TOOL_PARSERS["ui_tars"], REASONING_PARSERS["ui_tars"]


def both(text: str, tools: list[Any] | None = None, **formats: Any) -> WholeReply:
    formats = {"tool_parser": CALLS, "tools": tools or [], **formats}
    found = read_chunks([text], **formats)
    assert read_chunks(list(text), **formats) == found
    return found


def action(text: str, tools: list[Any] | None = None) -> dict[str, Any]:
    ((name, arguments),) = both(f"Action: {text}", tools).whole_calls
    assert name == "computer"
    return dict(arguments)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("click(start_box='(10, 20)')", {"point": [10, 20]}),
        ("click(start_box='[1, 2, 3, 4]')", {"point": [1, 2, 3, 4]}),
        ("click(point=(10.5, 20))", {"point": [10.5, 20]}),
        ("click(point='the button')", {"point": "the button"}),
        ("scroll(point='<point>1 2</point>', direction='down')",
         {"point": [1, 2], "direction": "down"}),
        ("drag(start_point='<point>1 2</point>', end_point='<point>3 4</point>')",
         {"start_point": [1, 2], "end_point": [3, 4]}),
        ("type(content='don't say (\\'no\\')\\n')", {"content": "don't say ('no')\n"}),
        ("type(content='a, b=1 and \"c\"')", {"content": 'a, b=1 and "c"'}),
        ("type(content=\"Action: click(point='(1,2)')\")",
         {"content": "Action: click(point='(1,2)')"}),
        ("finished('done')", {"content": "done"}),
        ("hotkey(key='ctrl shift t')", {"key": "ctrl+shift+t"}),
        ("hotkey(key='page down')", {"key": "page down"}),
        ("wait()", {}),
    ],
)  # fmt: skip
def test_an_action(text: str, arguments: dict[str, Any]) -> None:
    assert action(text) == {"action": text.partition("(")[0], **arguments}


def test_several_actions_under_one_label() -> None:
    found = both("Action: click(point='(1,2)')\n\ntype(content='a')\nDone.")
    assert [arguments["action"] for _, arguments in found.whole_calls] == ["click", "type"]
    assert found.content.strip() == "Done."


@pytest.mark.parametrize(
    "text",
    [
        *("Action: none needed", "Action: print(1, 2)", "Action:", "Action: click(point='(1,2)'"),
        *("Action: click(point=)", "Action: 3(a='b')", "Action: click(point='a', point='b')"),
    ],
)
def test_what_is_no_action_is_text(text: str) -> None:
    found = both(text)
    assert (found.calls, found.content) == ((), "" if text == "Action:" else text)


def test_a_tool_that_is_named_like_the_action() -> None:
    found = both("Action: click(start_box='(1,2)')", [tool("click", start_box="array")])
    assert found.whole_calls == [("click", {"start_box": [1, 2]})]


def test_another_tool_for_actions() -> None:
    found = both("Action: wait()", [tool("screen", action="string"), tool("f", a="string")])
    assert found.whole_calls == [("screen", {"action": "wait"})]


def test_thoughts_and_actions_in_turns() -> None:
    text = (
        "Reflection: It failed.\n\nAction_Summary: Once more: Action: is due.\n"
        "Action: click(point='(1,2)')\nThought: Then type.\nAction: type(content='x')<|im_end|>"
    )
    found = both(text, reasoning_parser=THOUGHTS)
    assert [arguments["action"] for _, arguments in found.whole_calls] == ["click", "type"]
    assert "Once more: Action: is due." in found.reasoning
    assert found.reasoning.endswith("Thought: Then type.")
    assert found.content == ""


@pytest.mark.parametrize("sep", ["\n\n", "\n"])
def test_an_answer_behind_a_thought(sep: str) -> None:
    found = both(f"Thought: Easy.{sep}Answer: 4", reasoning_parser=THOUGHTS)
    assert (found.reasoning, found.content) == ("Thought: Easy.", "Answer: 4")


def test_labels_behind_a_marked_thought() -> None:
    text = "<think>a\nThought: b</think>\n\nThought: c\nAction: wait()"
    found = both(text, reasoning_parser=THOUGHTS)
    assert found.whole_calls == [("computer", {"action": "wait"})]
    assert (found.reasoning, found.content) == ("a\nThought: b\nThought: c", "")
