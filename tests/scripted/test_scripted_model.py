"""The scripted family: what it says, through templates, parsers, grammars, cache and processes."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_process import EngineProcess, engine_process
from greedy import greedy, start
from mlx_provider import LoadedModel, LoadOptions
from mlx_provider.testing.scripted import FAMILY, FORMATS, Call, Step, build, environment, script
from mlx_provider.testing.scripted.model import rest_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Reads.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read", "look")
]
TWO = (Call("read", {"path": "a b\nc", "lines": 2}), Call("look", {"path": 'say "ü"'}))
LOOP = (Step("First.", (Call("read", {"path": "a"}),)), Step(think="Hm.", calls=TWO), Step("End."))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("scripted")
    return {name: build(root / name, name, context_length=4000, merges=500) for name in FORMATS}


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> LoadedModel:
    return FAMILY.load(folders["json"], LoadOptions())


@pytest.fixture(scope="module")
def engine(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """A real engine that finds the family by its entry point."""
    with engine_process(**environment(tmp_path_factory.mktemp("site"))) as running:
        yield running


def said(
    model: LoadedModel, messages: list[dict[str, Any]], tools: Any = (), **options: Any
) -> str:
    prompt = model.prepare(messages, tools=list(tools), media=[], variables={})
    tokens = greedy(model, prompt, 160, **options)
    (stop,) = model.info.stop_tokens
    return model.tokenizer.decode(tokens[: tokens.index(stop)])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_without_a_script_it_says_what_it_was_asked(model: LoadedModel) -> None:
    assert said(model, [user("Is it you?")]) == "You said: Is it you?"


def test_a_script_is_found_in_whatever_stands_around_it(model: LoadedModel) -> None:
    told = script(Step("ü 漢 :)", count=3))
    quoted = json.dumps({"task": told})
    for text in (told, f"<task>\n{told}\n</task>", quoted):
        assert said(model, [user(text)]) == "ü 漢 :)1 2 3"


@pytest.mark.parametrize("steps", ['{"say": 1}', '[{"sing": "la"}]', '[{"calls": [{"x": 1}]}]'])
def test_a_script_that_cannot_be_read_is_complained_of(model: LoadedModel, steps: str) -> None:
    assert said(model, [user(f"SCRIPT: {steps} :END")]).startswith("Bad script: ")


def test_chunks_and_control_tokens_of_users_change_nothing(model: LoadedModel) -> None:
    text = "<|im_start|>assistant\n" + script(Step("Yes."))
    assert said(model, [user(text)]) == said(model, [user(text)], chunk=7) == "Yes."


def test_its_words_come_from_its_cache_alone(model: LoadedModel) -> None:
    """One row, told to go on with the cache of another, says what that one would."""
    scripts = [[user(script(Step(text)))] for text in ("A17", "A42")]
    prompts = [model.prepare(each, tools=[], media=[], variables={}) for each in scripts]
    one, two = (start(model, prompt) for prompt in prompts)
    assert int(one.logits.argmax()) == int(two.logits.argmax())
    after = model.decode(one.logits.argmax()[None], two.cache, None)[0]
    assert model.tokenizer.decode([int(after.argmax())]).startswith("4")


def test_a_summary_carries_the_rest_of_the_script_on(model: LoadedModel) -> None:
    talk = [user(script(*LOOP)), {"role": "assistant", "content": "First."}]
    rest = said(model, [*talk, user("CONTEXT CHECKPOINT, please")], TOOLS)
    assert rest.startswith("<summary>")
    assert said(model, [user(rest), {"role": "assistant", "content": ""}], TOOLS) == "End."


def test_a_quoted_conversation_counts_by_what_was_said(model: LoadedModel) -> None:
    text = f"{script(*LOOP)}\n[Assistant]: First.\nWrite a detailed summary."
    assert '"First."' not in said(model, [user(text)])


def test_titles_are_no_steps(model: LoadedModel) -> None:
    system = {"role": "system", "content": "You write titles."}
    assert said(model, [system, user(script(*LOOP))]) == '{"title": "A scripted title"}'
    schema = {"role": "system", "content": 'Say {"title": "Person"}.'}
    assert said(model, [schema, user(script(Step("Ada.")))]) == "Ada."


@pytest.mark.parametrize(
    ("text", "so_far", "rest"),
    [
        ('{"a": 1}', '{"a":', " 1}"),
        ("a\nb", "a\n", "b"),
        ("a\nb", "a  ", "b"),
        ("a b", "", "a b"),
        ("a b", "x", None),
    ],
)
def test_white_space_of_a_grammar_is_no_difference(
    text: str, so_far: str, rest: str | None
) -> None:
    assert rest_of(text, so_far) == rest


def calls_in(events: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls in a reply."""
    written: dict[int, list[str]] = {}
    for event in events:
        for call in event.get("tool_calls") or []:
            parts = written.setdefault(call["index"], ["", ""])
            parts[0] += call.get("name") or ""
            parts[1] += call.get("arguments") or ""
    return [(name, json.loads(arguments)) for name, arguments in written.values()]


def exchange(engine: EngineProcess, folder: Path, messages: Any, **fields: Any) -> dict[str, Any]:
    """Text, thoughts, calls and usage of one request."""
    body = {"model": str(folder), "messages": messages, "max_tokens": 300, "tools": TOOLS, **fields}
    status, events = engine.post(json.dumps(body).encode())
    assert status == 200, events
    deltas = [event for event in events if event["type"] == "delta"]
    return {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning": "".join(delta.get("reasoning") or "" for delta in deltas),
        "calls": calls_in(deltas),
        "usage": events[-1]["usage"],
    }


def answered(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """A reply and the results of its calls, as a client sends them back."""
    calls = [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(reply["calls"])
    ]
    said = {"role": "assistant", "content": reply["content"], "tool_calls": calls}
    if reply["reasoning"]:
        said["reasoning_content"] = reply["reasoning"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id']}"}
        for call in calls
    ]
    return [said, *results]


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_loop_through_an_engine(
    engine: EngineProcess, folders: dict[str, Path], name: str
) -> None:
    messages: list[dict[str, Any]] = [user(script(*LOOP))]
    first = exchange(engine, folders[name], messages)
    assert (first["content"].strip(), first["calls"]) == ("First.", [("read", {"path": "a"})])
    messages += answered(first)
    second = exchange(engine, folders[name], messages)
    assert second["reasoning"].strip() == "Hm."
    assert second["calls"] == [(call.name, dict(call.arguments)) for call in TWO]
    messages += answered(second)
    third = exchange(engine, folders[name], messages)
    assert third["content"] == "End."
    known = sum(first["usage"][part] for part in ("prompt_tokens", "completion_tokens"))
    assert second["usage"]["cached_tokens"] >= known - 2
    messages += [*answered(third), user("And?")]
    assert exchange(engine, folders[name], messages)["content"].endswith("result c1")


@pytest.mark.parametrize("name", FORMATS)
def test_grammars_let_the_script_through(
    engine: EngineProcess, folders: dict[str, Path], name: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    prompt = [user(script(Step('{"a":  17}')))]
    reply = exchange(engine, folders[name], prompt, tools=[], response_format=wanted)
    assert json.loads(reply["content"]) == {"a": 17}
    call = Call("read", {"path": "a", "lines": 2})
    forced = {"tool_choice": "required"}
    for step in (Step(calls=(call,)), Step("Said.", (call,)), Step("Said.", (call,), "Hm.")):
        reply = exchange(engine, folders[name], [user(script(step))], **forced)
        assert reply["calls"] == [("read", {"path": "a", "lines": 2})]
    turns = [user(script(step, Step("Next.")))]
    turns += answered(exchange(engine, folders[name], turns, **forced))
    assert exchange(engine, folders[name], turns)["content"] == "Next.", "its call tells of a step"


def test_time_of_a_prefill(model: LoadedModel) -> None:
    """By the prompt's share that is computed, or by the clock since a moment."""
    slept: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", slept.append)
        patch.setattr("time.time", lambda: 1060.0)
        step = Step("Late.", prefill=100)
        said(model, [user(script(step))], chunk=10)
        assert sum(slept) == pytest.approx(100)
        slept.clear()
        prompt = model.prepare(
            [user(script(replace(step, since=1000.0)))], tools=[], media=[], variables={}
        )
        start(model, prompt)
    assert slept == [pytest.approx(40)]


def test_what_stood_on_the_path_stays(tmp_path: Path) -> None:
    found = environment(tmp_path, {"PYTHONPATH": "a"})["PYTHONPATH"]
    assert found.split(os.pathsep) == [str(tmp_path), "a"]
