"""Requests for models whose template has no tools, refuses a schema, or never ends."""

import json
import threading
from typing import Any

import pytest

from mlx_provider import BadRequest, ContextTooLong, ToolParser, UnsupportedModel
from mlx_provider.bounded_process import BoundedProcesses
from mlx_provider.chat.constraints import compiler
from mlx_provider.chat.constraints.vocabulary import grammar_tokenizer
from mlx_provider.chat.messages.tools_as_text import describe_tools
from mlx_provider.families.tokenizer import template
from mlx_provider.families.tokenizer.hf_tokenizer import NO_CALLS as NOTE_CALLS
from mlx_provider.families.tokenizer.hf_tokenizer import NO_TEXT_BESIDE_CALLS, REFUSES
from mlx_provider.families.tokenizer.hf_tokenizer import NO_TOOLS as NOTE_TOOLS
from mlx_provider.serving import loader
from mlx_provider.serving import prompt as prompts
from mlx_provider.serving.prompt import HISTORY_AS_TEXT, TEXT_LEFT_OUT, TOOLS_AS_TEXT
from waiting import PATIENCE

NO_TOOLS = """\
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
PICKY = """\
{%- for tool in tools or [] -%}
<tool_call>{{ tool | tojson }}
{%- for k, v in tool.function.parameters.properties.items() -%}{{ k + v.type }}{%- endfor -%}
{%- endfor -%}
""" + NO_TOOLS.replace("{{ m.content }}", "{{ m.content }}{{ (m.tool_calls or []) | tojson }}")
"""Takes no parameter without a type."""
ALTERNATES = """\
{%- set ns = namespace(at=0) -%}
{%- for m in messages if m.role in ("user", "assistant") and not m.tool_calls -%}
{%- if (m.role == "user") != (ns.at % 2 == 0) -%}{{ raise_exception("no") }}{%- endif -%}
{%- set ns.at = ns.at + 1 -%}
{%- endfor -%}
""" + NO_TOOLS.replace(
    "{{ m.content }}", "{{ m.tool_calls[0].function | tojson if m.tool_calls else m.content }}"
)
"""As Mistral Nemo's: it refuses turns of one role, and shows no text beside calls."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a place.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"enum": ["home", "sea"]}},
                "required": ["at"],
                "additionalProperties": False,
            },
        },
    }
]
ASKED = [{"role": "system", "content": "xSYSx"}, {"role": "user", "content": "xASKx"}]


def test_tools_are_described_if_the_template_shows_none(tiny: Any) -> None:
    model = tiny("qwen3", NO_TOOLS)
    prompt = model.prompt_of(messages=ASKED, tools=TOOLS)
    about = describe_tools(TOOLS, model.served().forced_parser)
    assert prompt.startswith(f"<|im_start|>system\nxSYSx\n\n{about}<|im_end|>")
    assert "Looks at a place." in about
    assert "look" not in model.prompt_of(messages=ASKED, tools=TOOLS, tool_choice="none")
    answer = model.ask(messages=ASKED, tools=TOOLS, max_tokens=2)
    assert TOOLS_AS_TEXT in answer.warnings
    notes = model.service.health().models
    (status,) = [each for each in notes if each.model == model.model]
    assert {NOTE_TOOLS, NOTE_CALLS} <= set(status.notes)


def test_calls_in_the_history_have_the_format_that_the_model_must_write(tiny: Any) -> None:
    model = tiny("qwen3", NO_TOOLS)
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    asked["parallel_tool_calls"] = False
    first = model.ask(messages=ASKED, **asked)
    assert first.only.reason == "tool_calls"
    ((name, arguments),) = first.only.arguments
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "xRESULTx"},
    ]
    prompt = model.prompt_of(messages=history, tools=TOOLS)
    assert prompt.startswith(model.prompt_of(messages=ASKED, tools=TOOLS))
    grammar = model.served().forced_parser.call_grammar()
    written = grammar.write(name, arguments, TOOLS[0]["function"]["parameters"])
    assert f"<|im_start|>assistant\n{written}<|im_end|>\n<|im_start|>user\nxRESULTx" in prompt
    second = model.ask(messages=history, **asked)
    assert HISTORY_AS_TEXT in second.warnings
    assert second.usage.cached_tokens > 0.9 * first.prompt_tokens


def test_function_calls_in_the_older_form_become_text_too(tiny: Any) -> None:
    model = tiny("qwen3", NO_TOOLS)
    call = {"name": "look", "arguments": '{"at": "sea"}'}
    turn = {"role": "assistant", "content": None, "function_call": call}
    told = {"role": "function", "name": "look", "content": "xRESULTx"}
    old = [*ASKED, turn, told]
    new = [*ASKED, {**turn, "function_call": None, "tool_calls": [{"function": call}]}, told]
    prompt = model.prompt_of(messages=old)
    assert '"look"' in prompt
    assert "<|im_start|>user\nxRESULTx" in prompt
    assert prompt == model.prompt_of(messages=new)
    assert model.ask(messages=old, max_tokens=2).warnings == [HISTORY_AS_TEXT]


def test_tools_that_the_template_refuses_are_described(tiny: Any) -> None:
    model = tiny("qwen3", PICKY)
    assert model.served().info.template.shows_tools == "always"
    prompt = model.prompt_of(messages=ASKED, tools=TOOLS)
    parser = model.served().tool_parser or model.served().forced_parser
    assert describe_tools(TOOLS, parser) in prompt
    assert TOOLS_AS_TEXT in model.ask(messages=ASKED, tools=TOOLS, max_tokens=2).warnings


def called(content: str | None) -> list[dict[str, Any]]:
    """A call and its result."""
    function = {"name": "look", "arguments": '{"at": "sea"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        *ASKED[1:],
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "xRESULTx"},
    ]


def test_text_that_a_template_drops_beside_calls_is_reported(
    tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("qwen3", ALTERNATES + "{# the log tells once of a template #}")
    answer = model.ask(messages=called("xSAYx"), max_tokens=2)
    assert answer.warnings == [TEXT_LEFT_OUT]
    assert model.ask(messages=called(None), max_tokens=2).warnings == []
    (status,) = [m for m in model.service.health().models if m.model == model.model]
    assert NO_TEXT_BESIDE_CALLS in status.notes
    assert f": {NO_TEXT_BESIDE_CALLS}" in caplog.text


@pytest.mark.parametrize("role", ["user", "developer"])
def test_text_after_a_result_keeps_the_templates_form(tiny: Any, role: str) -> None:
    model = tiny("qwen3", ALTERNATES)
    history = [*called(None), {"role": role, "content": "xAGAINx"}]
    assert "<|im_start|>tool\nxRESULTx\n\nxAGAINx<|im_end|>" in model.prompt_of(messages=history)
    assert model.ask(messages=history, max_tokens=2).warnings == []


def test_a_fold_of_one_request_is_logged_once(tiny: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("qwen3", PICKY + "{# nothing of it was logged before #}")
    for _ in range(2):
        model.ask(messages=ASKED, tools=TOOLS, max_tokens=2)
    told = [r.getMessage() for r in caplog.records if TOOLS_AS_TEXT in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(model.model)
    assert "(line 3 of the template)" in told[0]


def test_null_fields_of_a_tool_are_left_out(tiny: Any) -> None:
    model = tiny("qwen3", PICKY.replace("k + v.type", "k"))
    bare = {"type": "function", "function": {"name": "look"}}
    null = {**bare["function"], "description": None, "parameters": None, "strict": None}
    prompts = [
        model.prompt_of(messages=ASKED, tools=[{"type": "function", "function": each}])
        for each in (bare["function"], null)
    ]
    assert prompts[0] == prompts[1]
    assert "null" not in prompts[1]
    asked = model.ask(messages=ASKED, tools=[{**bare, "function": null}], max_tokens=2)
    assert TOOLS_AS_TEXT not in asked.warnings


def test_a_parser_can_describe_tools_itself() -> None:
    parser = ToolParser("own", "<a>", "</a>", describe=lambda tools: f"{len(tools)} of my own")
    assert describe_tools(TOOLS, parser) == "1 of my own"


@pytest.mark.parametrize(
    "bomb", ["{{ 'a' * 3000000000 }}", "{{ '%4000000000d' % 3 }}", "{{ messages[0] ** 9 }}"]
)
def test_a_model_with_an_endless_template_is_not_served(tiny: Any, bomb: str) -> None:
    model = tiny("qwen3", NO_TOOLS + bomb)
    with pytest.raises((UnsupportedModel, BadRequest), match="chat template"):
        model.ask(max_tokens=2)
    assert tiny("qwen3", NO_TOOLS).ask(max_tokens=2).only.reason == "length"


def test_a_large_vocabulary_for_grammars_is_built_at_load(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = threading.Event()

    def seen(*given: Any) -> Any:
        built.set()
        return grammar_tokenizer(*given)

    monkeypatch.setattr(compiler, "grammar_tokenizer", seen)
    monkeypatch.setattr(loader, "LARGE_VOCABULARY", 1)
    tiny("qwen3", NO_TOOLS + "{# its own weights #}").ask(max_tokens=1)
    assert built.wait(PATIENCE)


# The loops write nothing: a fast machine would reach the bound on characters first.
NESTED = """\
{%- for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}
{%- endfor %}{% endfor %}{% endfor %}"""


def test_nested_loops_are_tried_once_and_other_requests_continue(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbour = tiny("qwen3", NO_TOOLS)
    served = neighbour.start(max_tokens=100_000)
    assert served.get(PATIENCE)
    ask, tried = BoundedProcesses.ask, []

    def note(processes: BoundedProcesses, message: bytes, setups: Any) -> bytes:
        if NESTED.partition("%}")[0].encode() in b"".join(setups.values()):
            tried.append(threading.current_thread().name)
        return ask(processes, message, setups)

    monkeypatch.setattr(BoundedProcesses, "ask", note)
    monkeypatch.setattr(template, "SECONDS", 0.5)
    try:
        with pytest.raises(UnsupportedModel, match="takes too much processor time"):
            tiny("qwen3", NO_TOOLS + NESTED).ask(max_tokens=2)
        assert served.get(PATIENCE), "it went on, or has ended since"
    finally:
        served.close()
    assert tried == ["mlx-load"]  # never the engine thread, which the neighbour needs


def test_a_text_longer_than_the_context_is_not_blamed_on_the_template(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exceeds(*given: Any) -> None:
        raise template.TemplateLimit("the template makes too large a value")

    model = tiny("qwen3", NO_TOOLS)
    model.ask(max_tokens=1)
    monkeypatch.setattr(prompts, "_render_form", exceeds)
    with pytest.raises(UnsupportedModel, match="too large a value"):
        model.ask("short")
    with pytest.raises(ContextTooLong):
        model.ask("x" * (2 << 20))


def test_a_template_error_names_the_part_and_the_line(tiny: Any) -> None:
    model = tiny("qwen3", "{{ functions.x }}" + NO_TOOLS)
    note = model.served().info.notes[0]
    assert not {NOTE_TOOLS, NOTE_CALLS} & set(model.served().info.notes)
    assert note.startswith(REFUSES)
    assert note.endswith("'functions' is undefined (line 1 of the template)")
    with pytest.raises(BadRequest, match=r"'functions' is undefined \(line 1 of the template\)"):
        model.ask(max_tokens=2)
