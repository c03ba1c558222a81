"""Call ids for templates that require nine letters and digits, in replies and in later prompts."""

import json
from typing import Any

import pytest

from mlx_provider.protocol.requests import Sampling

TURNS = """\
{%%- if tools -%%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%%- endif -%%}
{%%- for m in messages -%%}
{%%- if m.tool_calls -%%}
{%%- for c in m.tool_calls -%%}
{%%- if c.id | length != 9 -%%}{{ raise_exception('nine characters') }}{%%- endif -%%}
%s
{%%- endfor -%%}
<|im_end|>
{%%- elif m.role == 'tool' -%%}
{%%- if m.tool_call_id | length != 9 -%%}{{ raise_exception('nine characters') }}{%%- endif -%%}
[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]
{%%- elif m.role == 'assistant' -%%}
{{ m.content }}<|im_end|>
{%%- else -%%}
[INST]{{ m.content }}[/INST]
{%%- endif -%%}
{%%- endfor -%%}
"""
BEFORE = TURNS % (
    "{{ '[TOOL_CALLS]' ~ c.function.name ~ '[CALL_ID]' ~ c.id ~ '[ARGS]' "
    "~ (c.function.arguments | tojson) }}"
)
"""As Mistral Small 3.2 writes them."""
BEHIND = TURNS % (
    "{{ '[TOOL_CALLS][' if loop.first else ', ' }}{{ (c.function | tojson)[:-1] ~ "
    "', \"id\": \"' ~ c.id ~ '\"}' }}{{ ']' if loop.last }}"
)
"""As Mistral Nemo writes them."""
NAMED = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
## Return of {{ m.tool_call_id }}: {{ m.content }}<|im_end|>
{%- else -%}
<|im_{{ m.role }}|>{{ m.content or '' }}
{%- if m.tool_calls -%}
<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson -}}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>{%- endif -%}
"""
"""As Kimi K2 writes them: the id holds the tool's name."""
WRITTEN = {
    BEFORE: lambda i, given: f"[TOOL_CALLS]look[CALL_ID]{i}[ARGS]{given}",
    BEHIND: lambda i, given: f'{{"name": "look", "arguments": {given}, "id": "{i}"}}',
}
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
ASKED = [{"role": "user", "content": "xASKx"}]
forms = pytest.mark.parametrize("template", [BEFORE, BEHIND], ids=["before", "behind"])


def output(template: str, *ids: str, arguments: str = "") -> str:
    calls = [WRITTEN[template](i, arguments or f'{{"at": "{i} sea"}}') for i in ids]
    return f"[TOOL_CALLS][{', '.join(calls)}]" if template == BEHIND else "".join(calls)


def reply(model: Any, messages: list[Any], text: str) -> Any:
    """The reply of a model that writes exactly this text."""
    given = {"tools": TOOLS, "grammar": {"type": "lark", "value": f"start: {json.dumps(text)}"}}
    return model.ask(messages=messages, max_tokens=400, **given)


def history(choice: Any, asked: list[Any] = ASKED) -> list[Any]:
    """The history as a client sends it."""
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in zip(choice.ids, choice.calls, strict=True)
    ]
    told = [{"role": "tool", "tool_call_id": i, "content": f"x{i}x"} for i in choice.ids]
    return [*asked, {"role": "assistant", "content": None, "tool_calls": calls}, *told]


@forms
def test_the_next_prompt_reuses_a_reply_with_the_models_own_ids(tiny: Any, template: str) -> None:
    model = tiny("qwen3", template)
    assert model.served().info.template.short_ids
    encode = model.served().model.tokenizer.encode_plain
    text = output(template, "abcDEF123", "000000001")
    first = reply(model, ASKED, text)
    assert first.only.ids == ["abcDEF123", "000000001"]
    prompt = model.prompt_of(messages=ASKED, tools=TOOLS)
    then = model.prompt_of(messages=history(first.only), tools=TOOLS)
    computed = encode(f"{prompt}{text}<|im_end|>")
    assert encode(then)[: len(computed)] == computed
    second = reply(model, history(first.only), "Done.")
    assert second.warnings == []
    assert second.usage.cached_tokens >= first.prompt_tokens + first.usage.completion_tokens - 1


def test_calls_are_counted_if_an_id_contains_the_tools_name(tiny: Any) -> None:
    model = tiny("qwen3", NAMED)
    assert model.served().info.template.named_ids
    messages, made = ASKED, []
    for numbers in ((0, 1), (2,)):
        call = '<|tool_call_begin|>functions.look:{}<|tool_call_argument_begin|>{{"at": "sea"}}'
        calls = "".join(f"{call.format(i)}<|tool_call_end|>" for i in numbers)
        text = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
        prompt = model.prompt_of(messages=messages, tools=TOOLS)
        choice = reply(model, messages, text).only
        messages, made = history(choice, messages), [*made, *choice.ids]
        then = model.prompt_of(messages=messages, tools=TOOLS)
        assert then.startswith(f"{prompt}{text}<|im_end|>")
        assert all(f"## Return of functions.look:{i}: " in then for i in numbers)
    assert len(set(made)) == 3
    last = messages[-1]
    swapped = [*messages[:2], messages[3], messages[2], *messages[4:-1], {**last, "content": "z"}]
    then = model.prompt_of(messages=swapped, tools=TOOLS)
    returned = [f"functions.look:{i}: x{made[i]}x" for i in (0, 1)]  # in the order of the calls
    assert f"## Return of {returned[0]}<|im_end|>## Return of {returned[1]}" in then
    assert "## Return of functions.look:2: z" in then


@forms
def test_a_forced_call_has_the_models_own_id(tiny: Any, template: str) -> None:
    model = tiny("qwen3", template)
    encode = model.served().model.tokenizer.encode_plain
    (seven,) = encode("7")
    sampling = Sampling(temperature=0, logit_bias={seven: 100})  # if the grammar permits it
    tools = [{"type": "function", "function": {"name": "look"}}]
    given = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    first = model.ask(messages=ASKED, max_tokens=200, sampling=sampling, **given)
    assert (first.only.ids, first.only.calls) == (["777777777"], [["look", "{}"]])
    prompt = model.prompt_of(messages=ASKED, tools=tools)
    then = model.prompt_of(messages=history(first.only), tools=tools)
    computed = encode(prompt + output(template, "777777777", arguments="{}") + "<|im_end|>")
    assert encode(then)[: len(computed)] == computed
    second = model.ask(messages=history(first.only), tools=tools, max_tokens=1)
    assert second.usage.cached_tokens >= first.prompt_tokens + first.usage.completion_tokens - 1


@forms
def test_an_id_that_names_two_calls_stays_with_the_first(tiny: Any, template: str) -> None:
    model = tiny("qwen3", template)
    first = reply(model, ASKED, output(template, "abcDEF123", "abcDEF123")).only
    assert first.ids[0] == "abcDEF123"
    again = reply(model, history(first), output(template, first.ids[1])).only
    made = [*first.ids, *again.ids]
    assert len(set(made)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in made)


@forms
def test_ids_of_invalid_forms_are_replaced(tiny: Any, template: str) -> None:
    model = tiny("qwen3", template)
    for odd in ("1", "é" * 9, "x" * 41, "functions.look:0"):
        (made,) = reply(model, ASKED, output(template, odd)).only.ids
        assert made != odd
        assert len(made) == 9
    foreign = reply(model, ASKED, output(template, "toolu_01A09q90qw90lq")).only
    assert foreign.ids == ["toolu_01A09q90qw90lq"]
    prompt = model.prompt_of(messages=history(foreign), tools=TOOLS)
    assert "[TOOL_RESULTS]toolu" not in prompt


def test_a_call_that_is_cut_before_its_id_keeps_its_arguments(tiny: Any) -> None:
    model = tiny("qwen3", BEHIND)
    text = output(BEHIND, "abcDEF123")
    for end in (text.index("sea"), text.index('"id"'), text.rindex("DEF")):
        choice = reply(model, ASKED, text[:end]).only
        ((name, arguments),) = choice.calls
        assert name == "look"
        assert '{"at": "abcDEF123 sea"}'.startswith(arguments)
        assert '{"at": "abcDEF123 ' in arguments
        assert "DEF123" not in choice.ids[0]
