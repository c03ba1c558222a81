"""What `mlx-provider parse` makes of replies, however they are cut into pieces."""

import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest
from mlx_provider_command_a import END, START, mlx_tool_parsers

from mlx_provider.records import TextReader

ROLL = '{"tool_call_id": "0", "tool_name": "roll", "parameters": {"sides": 6}}'
LATER = '{"parameters": {"text": "]<|END_ACTION|> \\"{"}, "tool_name": "say"}'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("roll", "say")
]


@dataclass(frozen=True)
class Case:
    """A reply, and what is in it."""

    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)
    content: str = ""
    thoughts: str = ""


CASES = {
    "one": Case(f"{START}[\n    {ROLL}\n]{END}", [("roll", {"sides": 6})]),
    "text before": Case(
        f"Let me see. {START}[{ROLL}]{END}", [("roll", {"sides": 6})], "Let me see."
    ),
    "several": Case(
        f"{START}[\n    {ROLL},\n    {LATER}\n]{END}",
        [("roll", {"sides": 6}), ("say", {"text": ']<|END_ACTION|> "{'})],
    ),
    "two blocks": Case(f"{START}[{ROLL}]{END}{START}[{ROLL}]{END}", [("roll", {"sides": 6})] * 2),
    "no list": Case(f"{START}{ROLL}{END}", [("roll", {"sides": 6})]),
    "no end": Case(f"{START}[{ROLL}]", [("roll", {"sides": 6})]),
    "no parameters": Case(f'{START}[{{"tool_name": "roll"}}]{END}', [("roll", {})]),
    "nothing called": Case(f"{START}[]{END}"),
    "no name": Case(
        f'{START}[{{"parameters": {{}}}}]{END} So', [], f'{START}[{{"parameters": {{}}}}]{END} So'
    ),
    "no object": Case(f"{START}roll a die{END}", [], f"{START}roll a die{END}"),
    "parameters are a text": Case(
        f'{START}[{{"tool_name": "roll", "parameters": "6"}}]{END}',
        [],
        f'{START}[{{"tool_name": "roll", "parameters": "6"}}]{END}',
    ),
    "thoughts": Case(
        f"<|START_THINKING|>I roll.<|END_THINKING|>{START}[{ROLL}]{END}",
        [("roll", {"sides": 6})],
        thoughts="I roll.",
    ),
    "an answer": Case(
        "<|START_THINKING|>Easy.<|END_THINKING|><|START_TEXT|>Four.<|END_TEXT|>",
        content="Four.",
        thoughts="Easy.",
    ),
}


def pieces(text: str) -> list[list[str]]:
    """Whole, character by character, in threes, and cut once within each marker."""
    cuts = {
        text.find(mark) + at for mark in (START, END) for at in (1, 9, len(mark)) if mark in text
    }
    once = [[text[:cut], text[cut:]] for cut in sorted(cuts)]
    return [[text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)], *once]


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """By case, one answer for each way to cut it: all of one process."""
    lines = [
        {"id": name, "tool_parser": "command_a", "chunks": chunks, "tools": TOOLS}
        | ({"reasoning_parser": "north"} if case.thoughts else {})
        for name, case in CASES.items()
        for chunks in pieces(case.text)
    ]
    ran = subprocess.run(
        [sys.executable, "-c", "from mlx_provider.cli import main; main()", "parse"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for line in ran.stdout.splitlines():
        answer = json.loads(line)
        answers[answer["id"]].append(answer)
    return answers


@pytest.mark.parametrize("name", CASES)
def test_a_reply_gives_the_same_calls_however_its_text_is_cut(
    name: str, found: dict[str, list[dict[str, Any]]]
) -> None:
    case = CASES[name]
    assert len(found[name]) == len(pieces(case.text))
    for answer in found[name]:
        calls = [(c["name"], c["arguments"]) for c in answer["tool_calls"] or []]
        assert calls == case.calls
        assert (answer["content"] or "").strip() == case.content
        assert (answer["reasoning_content"] or "") == case.thoughts


def test_parameters_are_reported_before_the_call_is_complete() -> None:
    (parser,) = mlx_tool_parsers()
    reader, told = TextReader(), []
    reading = parser.scan(reader, TOOLS)
    for character in f'{START}[{{"tool_name": "say", "parameters": {{"text": "a long one':
        reader.feed(character)
        next(reading)
        told += reader.take_events()
    assert (told[0].kind, told[0].text) == ("call", "say")
    assert "".join(event.text for event in told[1:]) == '{"text": "a long one'
