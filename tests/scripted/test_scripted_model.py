"""The scripted family: what it says, through templates, parsers, grammars, cache and processes."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from greedy import continue_greedily, start
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


@pytest.fixture(scope="module", params=FORMATS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("scripted") / "model"
    return FAMILY.load(build(folder, request.param, context_length=4000, merges=500), LoadOptions())


def said(
    model: LoadedModel, messages: list[dict[str, Any]], tools: Any = (), **options: Any
) -> str:
    prompt = model.prepare(messages, tools=list(tools), media=[], variables={})
    row, tokens, (stop,) = start(model, prompt, **options), list[int](), model.info.stop_tokens
    while stop not in tokens and len(tokens) < 160:
        tokens += continue_greedily(model, [row], row.cache, 20)[0]
    return model.tokenizer.decode(tokens[: tokens.index(stop)])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_the_scripted_model_without_a_script_repeats_the_question(model: LoadedModel) -> None:
    assert said(model, [user("Is it you?")]) == "You said: Is it you?"


def test_a_script_is_found_inside_tags_and_json(model: LoadedModel) -> None:
    told = script(Step("ü 漢 :)", count=3))
    quoted = json.dumps({"task": told})
    for text in (told, f"<task>\n{told}\n</task>", quoted):
        assert said(model, [user(text)]) == "ü 漢 :)1 2 3"


@pytest.mark.parametrize("steps", ['{"say": 1}', '[{"sing": "la"}]', '[{"calls": [{"x": 1}]}]'])
def test_an_invalid_script_is_answered_with_its_fault(model: LoadedModel, steps: str) -> None:
    assert said(model, [user(f"SCRIPT: {steps} :END")]).startswith("Bad script: ")


def test_chunks_and_typed_control_tokens_do_not_change_the_reply(model: LoadedModel) -> None:
    text = "<|im_start|>assistant\n" + script(Step("Yes."))
    assert said(model, [user(text)]) == said(model, [user(text)], chunk=7) == "Yes."


def test_the_scripted_reply_is_read_from_the_cache_of_the_row(model: LoadedModel) -> None:
    """One row, told to go on with the cache of another, says what that one would."""
    scripts = [[user(script(Step(text)))] for text in ("A17", "A42")]
    prompts = [model.prepare(each, tools=[], media=[], variables={}) for each in scripts]
    one, two = (start(model, prompt) for prompt in prompts)
    assert int(one.logits.argmax()) == int(two.logits.argmax())
    after = model.decode(one.logits.argmax()[None], two.cache, None)[0]
    assert model.tokenizer.decode([int(after.argmax())]).startswith("4")


def test_a_summary_contains_the_rest_of_the_script(model: LoadedModel) -> None:
    talk = [user(script(*LOOP)), {"role": "assistant", "content": "First."}]
    rest = said(model, [*talk, user("CONTEXT CHECKPOINT, please")], TOOLS)
    assert rest.startswith("<summary>")
    thanks = [user(rest), {"role": "assistant", "content": "Thanks."}]
    assert said(model, thanks, TOOLS).startswith("<think>")
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in TWO]
    thanks += [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert said(model, thanks, TOOLS) == "End."
    thanks += [{"role": "assistant", "content": text} for text in ("End.", "I am done.")]
    assert said(model, thanks, TOOLS).startswith("All 2 steps are done.")


def test_a_quoted_conversation_continues_after_its_last_quoted_reply(model: LoadedModel) -> None:
    text = f"{script(*LOOP)}\n[Assistant]: First.\nWrite a detailed summary."
    assert '"First."' not in said(model, [user(text)])


def test_a_request_for_a_title_uses_no_step_of_the_script(model: LoadedModel) -> None:
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
def test_the_rest_of_a_scripted_text_ignores_white_space_of_a_grammar(
    text: str, so_far: str, rest: str | None
) -> None:
    assert rest_of(text, so_far) == rest


def test_a_scripted_prefill_sleeps_for_its_computed_share(model: LoadedModel) -> None:
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


def test_the_python_path_keeps_its_earlier_entries(tmp_path: Path) -> None:
    found = environment(tmp_path, {"PYTHONPATH": "a"})["PYTHONPATH"]
    assert found.split(os.pathsep) == [str(tmp_path), "a"]
