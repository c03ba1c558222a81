"""What a model wrote comes back in the next prompt as it was computed.

Output -> our reply -> a client's history -> the next prompt, which must begin with the first
prompt and the output. The templates are those of model families, cut to how they write a turn.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

import mlx_provider.demo
import mlx_provider_reasoning_parsers as reasoning_plugin
import mlx_provider_tool_parsers as tool_plugin
from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.chat.messages.tools_as_text import write_as_text
from mlx_provider.chat.output.reply import Reply
from mlx_provider.chat.output.turn_layout import TurnLayout, layout_of
from mlx_provider.protocol.events import Delta
from tiny.tokenizers import QWEN

DEMO = Path(mlx_provider.demo.__file__).parent / "model"
TURNS = Path(__file__).parents[1] / "data" / "chat" / "turns"
TOOL_PARSERS = {parser.name: parser for parser in tool_plugin.mlx_tool_parsers()}
THOUGHTS = {parser.name: parser for parser in reasoning_plugin.mlx_reasoning_parsers()}


@dataclass(frozen=True)
class Format:
    """A template, the parsers that its model needs, and what ends a turn."""

    template: str
    tool_parser: str
    thoughts: str = ""
    end: str = "<|im_end|>"
    most_calls: int = 2
    both: bool = True
    """Whether a turn may hold an answer and calls."""


def written(name: str, tool_parser: str, *more: str, **options: Any) -> Format:
    """A template of the folder. Its `fresh`: the user has not spoken since."""
    source = (TURNS / f"{name.replace(' ', '_')}.jinja").read_text(encoding="utf-8")
    return Format(source, tool_parser, *more, **options)


FORMATS = {
    name: written(name, *parsers, **options)
    for name, parsers, options in (
        ("qwen3", ("hermes", "qwen3"), {}),
        ("qwen3 whose prompt opens the thought", ("hermes", "qwen3"), {}),
        ("qwen3_coder", ("qwen3_coder",), {}),
        ("tight", ("hermes", "qwen3"), {}),
        ("glm", ("glm47", "glm4", ""), {}),
        ("deepseek_v31", ("deepseek_v31", "", "<｜end▁of▁sentence｜>"), {}),
        ("kimi_k2", ("kimi_k2", "kimi_k2"), {}),
        ("minimax_m2", ("minimax_m2", "minimax_m2", "[e~["), {}),
        ("mistral", ("mistral", "", "</s>"), {}),
        ("ids before arguments", ("mistral_call_id", "", "</s>"), {}),
        ("ids behind arguments", ("mistral_ids", "", "</s>"), {"both": False}),
        ("llama3", ("llama3_json", "", "<|eot_id|>"), {"most_calls": 1, "both": False}),
        ("granite", ("granite", "", "<|end_of_text|>"), {}),
        ("seed_oss", ("seed_oss", "seed_oss", "<seed:eos>"), {}),
        ("an answer behind a line end", ("hermes",), {}),
        ("an answer behind a space", ("mistral", "", "</s>"), {}),
    )
}
FORMATS["tiny qwen"] = Format(QWEN.template, "hermes", "qwen3")
FORMATS["demo"] = Format((DEMO / "chat_template.jinja").read_text(encoding="utf-8"), "hermes")
DROPS_THOUGHTS = {
    # earlier thoughts are left out once the user speaks again, which the family was trained on
    *("qwen3", "qwen3 whose prompt opens the thought", "glm", "minimax_m2")
}

ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
USER = {"role": "user", "content": "What is it?"}
ANSWER, THOUGHT = "I look it up.", "Two\n\nlines of thought"
SPACES = ("", "\n", "\n\n", " ", " \n")


@cache
def compiled(source: str) -> Template:
    return ENVIRONMENT.from_string(source)


def render(form: Format, messages: list[dict[str, Any]], *, begin: bool = False) -> str:
    template = compiled(form.template)
    return template.render(messages=messages, tools=None, add_generation_prompt=begin)


@cache
def layout(form: Format) -> TurnLayout:
    parsers = THOUGHTS.get(form.thoughts), TOOL_PARSERS[form.tool_parser]
    return layout_of(lambda messages: render(form, messages, begin=True), *parsers)


def call(number: int) -> dict[str, Any]:
    function = {"name": "look_up", "arguments": {"word": f"it {number}", "lines": "a\nb"}}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def following(calls: int) -> list[dict[str, Any]]:
    if not calls:
        return [{"role": "user", "content": "Thanks"}]
    return [{"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "look_up"}]


def outputs(form: Format, thought: str, answer: str, calls: int) -> str:
    """What a model writes that was trained on this template."""
    message = {
        "role": "assistant",
        "content": answer or None,
        "reasoning_content": thought,
        "tool_calls": [call(i) for i in range(calls)],
    }
    whole = render(form, [USER, message])
    prompt = render(form, [USER], begin=True)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].rstrip("\n").removesuffix(form.end)


def reply_to(form: Format, prompt: str, output: str, chunks: Iterable[str]) -> dict[str, Any]:
    """The message that a client keeps."""
    thoughts = THOUGHTS.get(form.thoughts)
    calls = TOOL_PARSERS[form.tool_parser]
    opened = thoughts is not None and prompt.rstrip().endswith(thoughts.openers())
    reply = Reply(
        tool_parser=calls,
        reasoning_parser=thoughts,
        reasoning_open=opened,
        layout=layout(form).after(prompt, thoughts.openers() if thoughts else ()),
    )
    deltas = [delta for chunk in chunks for delta in reply.push_text(chunk)]
    return message_of(deltas + reply.finish("stop")[0])


def message_of(deltas: list[Delta]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        made = calls.setdefault(
            piece.index, {"id": piece.id, "type": "function", "function": {"arguments": ""}}
        )
        made["function"].setdefault("name", piece.name)
        made["function"]["arguments"] += piece.arguments
    content = "".join(delta.content for delta in deltas)
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if reasoning := "".join(delta.reasoning for delta in deltas):
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": list(calls.values())} if calls else {"content": content})


def next_prompt(form: Format, message: dict[str, Any], calls: int) -> str:
    history = [USER, message, *following(calls)]
    return render(form, normalise(history, hoist_system=False).messages, begin=True)


def turns_of(name: str) -> Iterator[tuple[str, str, int]]:
    form = FORMATS[name]
    for thought, answer, calls in product(("", THOUGHT), ("", ANSWER), range(form.most_calls + 1)):
        if not (answer or calls) or (answer and calls and not form.both):
            continue
        if thought and (not form.thoughts or (name in DROPS_THOUGHTS and not calls)):
            continue
        opens = form.thoughts and render(form, [USER], begin=True).rstrip().endswith("<think>")
        if opens and not thought:
            continue
        yield thought, answer, calls


@pytest.mark.parametrize("name", FORMATS)
def test_the_next_prompt_begins_with_what_was_computed(name: str) -> None:
    form = FORMATS[name]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for thought, answer, calls in turns_of(name):
        prompt = render(form, [USER], begin=True)
        output = outputs(form, thought, answer, calls)
        message = reply_to(form, prompt, output, list(output))
        assert message == reply_to(form, prompt, output, [output])
        assert (message["content"] or "").strip() == answer
        assert message.get("reasoning_content", "") == thought
        then = next_prompt(form, message, calls)
        assert then.startswith(prompt + output + form.end)
        computed = tokenizer.encode(prompt + output + form.end).ids
        assert tokenizer.encode(then).ids[: len(computed) - 1] == computed[:-1]


@pytest.mark.parametrize("name", ["ids before arguments", "ids behind arguments"])
def test_calls_are_written_with_their_ids_as_the_template_writes_them(name: str) -> None:
    form = FORMATS[name]
    parser = TOOL_PARSERS[form.tool_parser]
    made = [call(i) for i in range(2)]
    given = [(each["function"]["name"], each["function"]["arguments"], {}) for each in made]
    written = parser.call_grammar().write_all(given, [each["id"] for each in made])
    assert written == outputs(form, "", "", 2)
    turn = {"role": "assistant", "content": "", "tool_calls": made}
    assert write_as_text([turn], parser)[0]["content"] == written


@pytest.mark.parametrize(
    "spaces", [("", "\n", " "), pytest.param(SPACES, marks=pytest.mark.sweep)], ids=["few", "all"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_white_space_that_the_template_can_write_comes_back(
    name: str, spaces: tuple[str, ...]
) -> None:
    """Other white space around the answer and the thought than the model was trained to write.

    Wherever some text of a client would give the output back, ours does.
    """
    form = FORMATS[name]
    prompt = render(form, [USER], begin=True)
    for thought, answer, calls in turns_of(name):
        if not answer:
            continue
        natural = outputs(form, thought, answer, calls)
        for text in (answer, *((thought,) if thought else ())):
            head, _, tail = natural.partition(text)
            for before, after in product(spaces, spaces):
                output = head.rstrip() + before + text + after + tail.lstrip()
                message = reply_to(form, prompt, output, [output])
                if returned(form, message, calls, prompt + output):
                    continue
                assert not any(
                    returned(form, other, calls, prompt + output)
                    for other in candidates(message, thought, answer)
                ), (output, message)


def returned(form: Format, message: dict[str, Any], calls: int, computed: str) -> bool:
    return next_prompt(form, message, calls).startswith(computed)


def candidates(message: dict[str, Any], thought: str, answer: str) -> Iterator[dict[str, Any]]:
    """The message with any white space around its texts."""
    for before, after in product(SPACES, SPACES):
        yield {**message, "content": before + answer + after}
        if thought:
            yield {**message, "reasoning_content": before + thought + after}


def test_a_template_that_refuses_the_trial_has_no_layout() -> None:
    assert layout_of(lambda messages: str(1 / 0), None, None) == TurnLayout()


def test_a_continued_answer_keeps_its_first_space() -> None:
    form = FORMATS["an answer behind a space"]
    own = layout(form)
    assert own.turn_open == " "
    for begins, content in ((True, "there"), (False, " there")):
        reply = Reply(layout=own.after("[INST] x [/INST]", (), begins=begins))
        deltas = reply.push_text(" there") + reply.finish("stop")[0]
        assert "".join(delta.content for delta in deltas) == content
