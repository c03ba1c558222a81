"""What a chat template demands is found at load, and every conversation then arrives whole."""

import copy
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from mlx_provider import BadRequest, TemplateForm
from mlx_provider.chat.messages.normalise import normalise
from mlx_provider.chat.messages.tools_as_text import describe_tools, write_as_text
from mlx_provider.chat.messages.turns import NO_RESULT
from mlx_provider.families.tokenizer.hf_tokenizer import HFTokenizer
from mlx_provider.families.tokenizer.template import (
    TemplateRenderer,
    fit_messages,
    fit_tools,
)
from mlx_provider.families.tokenizer.template_probe import has_system_role, template_form
from mlx_provider.records.parsing import short_id
from mlx_provider.serving.prompt import has_tools, hides_tools

BASE = """\
{%- if tools %}[tools]{% for tool in tools %}{{ TOOL }}{% endfor %}
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}[result]{{ m.content }}
{% else -%}
[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}CONTENT
{%- for c in m.tool_calls or [] -%}CHECK[call]{{ c.function.name }} ARGUMENTS{%- endfor %}
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif -%}
"""
TEXTS = "{{ m.content or '' }}"
MAPPING = "{{ c.function.arguments | tojson }}"


def template(
    *,
    tool: str = "{{ tool | tojson }}",
    content: str = TEXTS,
    check: str = "",
    arguments: str = MAPPING,
) -> str:
    """The base with one part in other words."""
    written = BASE.replace("{{ TOOL }}", tool).replace("CONTENT", content)
    return written.replace("CHECK", check).replace("ARGUMENTS", arguments)


RAISES = "{{ raise_exception('no') }}"


def refuse_if(condition: str) -> str:
    """A template's own check of a message `m`, or of a call `c` in it."""
    return f"{{% if {condition} %}}{RAISES}{{% endif %}}"


ALTERNATES = """\
{%- set ns = namespace(at=0) -%}
{%- for m in messages if m.role in ('user', 'assistant') and not m.tool_calls -%}
{%- if (m.role == 'user') != (ns.at % 2 == 0) -%}RAISES{%- endif -%}
{%- set ns.at = ns.at + 1 -%}
{%- endfor -%}
""".replace("RAISES", RAISES)

TEMPLATES = {
    "any": template(),
    "content beside calls": template(content="{{ '[' + m.content + ']' }}"),
    "no content beside calls": template(
        content="{% if m.content is none %}{% else %}{{ m.content }}{% endif %}"
    ).replace("m.tool_calls or []", "((m.tool_calls or []) if m.content is none else [])"),
    "calls begin as the prompt ends": template().replace(
        "[{{ m.role }}]",
        "{% if m.content is none %}<{{ m.role }}>{% else %}[{{ m.role }}]{% endif %}",
    ),
    "earlier calls with content": template().replace(
        "m.tool_calls or []",
        "((m.tool_calls or []) if m.content is not none or messages[-1].role == 'tool' else [])",
    ),
    "content absent": template(
        content="{% if m.content is defined %}{{ m.content + '' }}{% endif %}"
        + refuse_if("m.content is defined and m.tool_calls")
    ),
    "arguments as text": template(arguments="{{ '<' + c.function.arguments + '>' }}"),
    "arguments one by one": template(
        arguments="{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"
    ),
    "short ids": template(check=refuse_if("c.id | length != 9 or not c.id.isalnum()")).replace(
        "[result]", "[result]" + refuse_if("m.tool_call_id | length != 9")
    ),
    "ids hold names": template().replace("{{ c.function.name }}", "{{ c.id }}"),
    "one call a turn": template(check=refuse_if("m.tool_calls | length > 1")),
    "no text with calls": template(check=refuse_if("m.content")),
    "thoughts with calls alone": template(check=refuse_if("m.content")).replace(
        "{% if m.reasoning_content %}", "{% if m.reasoning_content and m.tool_calls %}"
    ),
    "no thoughts with text and calls": template(check=refuse_if("m.content and m.thinking")),
    "tools have a description": template(
        tool="{{ tool.function.name + tool.function.description }} {{ tool | tojson }}"
    ),
    "tools have parameters": template(
        tool="{{ tool | tojson }}"
        "{% for k in tool.function.parameters.properties.items() %}{{ k[0] }}{% endfor %}"
    ),
    "parameters have a description": template(
        tool="{{ tool | tojson }}{% for k, v in tool.function.parameters.properties.items() %}"
        "{{ k + v.description }}{% endfor %}"
    ),
    "objects have additional properties": template(
        tool="{{ tool | tojson }}{% for p in tool.function.parameters.properties.values() %}"
        "{% if p.type == 'object' %}{{ p.additionalProperties | tojson }}{% endif %}{% endfor %}"
    ),
    "types are texts": template(
        tool="{{ tool | tojson }}{% for k, v in tool.function.parameters.properties.items() %}"
        "{{ k + v.type }}{% endfor %}"
    ),
    "tools beside a system message": template().replace(
        "{%- if tools %}", "{%- if tools and messages[0].role == 'system' %}"
    ),
    "tools are a list": "{% for tool in tools %}{% endfor %}" + template(),
    "parts of text": template(
        content="{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content or [] %}<{{ p.text }}>{% endfor %}{% endif %}"
    ),
    "parts alone": template(content="{% for p in m.content or [] %}{{ p['text'] }}{% endfor %}"),
    "users speak after answers": ALTERNATES + template(),
    "no text beside calls": ALTERNATES
    + template().replace(TEXTS, f"{{% if not m.tool_calls %}}{TEXTS}{{% endif %}}"),
    "system messages beside others": template().replace(
        "[{{ m.role }}]",
        "{% if m.role == 'system' and loop.last %}{% continue %}{% endif %}[{{ m.role }}]",
    ),
    "no tools": "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "calls and no tools": template(tool=""),
    "tools and no calls": template().replace("m.tool_calls or []", "[]"),
}
"""By the demand."""

FORMS = {
    "any": {},
    "content beside calls": {"empty_content": "empty"},
    "no content beside calls": {"text_with_calls": "apart"},
    "calls begin as the prompt ends": {"empty_content": "empty"},
    "earlier calls with content": {"empty_content": "empty"},
    "content absent": {"empty_content": "absent", "text_with_calls": "apart"},
    "arguments as text": {"arguments": "text"},
    "arguments one by one": {},
    "short ids": {"short_ids": True},
    "ids hold names": {"named_ids": True},
    "one call a turn": {"parallel_calls": False},
    "no text with calls": {"text_with_calls": "apart"},
    "thoughts with calls alone": {"text_with_calls": "apart", "thought_with_calls": True},
    "no thoughts with text and calls": {"thought_with_text": False},
    "tools have a description": {"tool_fields": {"description"}},
    "tools have parameters": {"tool_fields": {"parameters"}},
    "parameters have a description": {"tool_fields": {"parameters", "properties"}},
    "objects have additional properties": {"tool_fields": {"parameters", "additionalProperties"}},
    "users speak after answers": {"user_after_result": False},
    "no text beside calls": {"user_after_result": False, "text_with_calls": "dropped"},
    "system messages beside others": {"lone_system": False},
    "types are texts": {"tool_fields": {"parameters"}, "type_lists": False},
    "tools beside a system message": {"shows_tools": "with_system"},
    "tools are a list": {},
    "parts of text": {"text_parts": {"system", "user", "assistant"}},
    "parts alone": {"text_parts": {"system", "user", "assistant"}, "parts_only": True},
    "no tools": {"takes_calls": False, "shows_tools": "never"},
    "calls and no tools": {"shows_tools": "never"},
    "tools and no calls": {"takes_calls": False},
}


def render(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: bool = True
) -> str:
    renderer = TemplateRenderer(TEMPLATES[name], {})
    return renderer.render(messages, tools, {}, generation_prompt=prompt)


@cache
def form_of(name: str) -> TemplateForm:
    return template_form(lambda m, t: render(name, list(m), list(t)))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_of_each_template_is_detected(name: str) -> None:
    sets = ("text_parts", "tool_fields")
    wanted = {k: frozenset(v) if k in sets else v for k, v in FORMS[name].items()}
    assert form_of(name) == TemplateForm(**wanted)


ROUND = st.fixed_dictionaries(
    {
        "content": st.sampled_from([None, "", "say"]),
        "thought": st.booleans(),
        "calls": st.integers(1, 3),
        "id": st.sampled_from(["call_6fd04c1a2b", "abcdefgh1", "toolu_01A09q90qw90lq917835"]),
        "answer": st.booleans(),
    }
)
CONVERSATIONS = st.tuples(st.booleans(), st.lists(ROUND, max_size=3), st.booleans())
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "properties": {"leaf": {"type": ["string", "null"]}, "deep": {"type": "number"}}
        },
    },
}
BARE = {"type": "function", "function": {"name": "ping"}}


def conversation(system: bool, rounds: list[dict[str, Any]]) -> tuple[list[Any], list[str]]:
    """As an OpenAI client sends it, and what must reach the prompt."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "xSYSTEMx"}] if system else []
    messages.append(
        {"role": "user", "content": [{"type": "text", "text": w} for w in "xAx xBx".split()]}
    )
    words = ["xAx", "xBx", *(["xSYSTEMx"] if system else [])]
    for number, each in enumerate(rounds):
        ids = [f"{each['id'][:-1]}{i}" for i in range(each["calls"])]
        turn: dict[str, Any] = {
            "role": "assistant",
            "content": each["content"] and f"xSAY{number}x",
        }
        if each["thought"]:
            turn["reasoning_content"] = f"xTHINK{number}x"
        turn["tool_calls"] = [
            {
                "id": i,
                "type": "function",
                "function": {
                    "name": "find",
                    "arguments": json.dumps({"leaf": f"x{number}LEAF{j}x"}),
                },
            }
            for j, i in enumerate(ids)
        ]
        messages.append(turn)
        messages += [
            {"role": "tool", "tool_call_id": i, "content": f"x{number}RESULT{j}x"}
            for j, i in enumerate(ids)
        ]
        words += [f"xSAY{number}x"] if each["content"] else []
        words += [
            f"x{number}{kind}{j}x" for kind in ("LEAF", "RESULT") for j in range(each["calls"])
        ]
        if each["answer"]:
            messages += [
                {"role": "assistant", "content": f"xANSWER{number}x"},
                {"role": "user", "content": f"xNEXT{number}x"},
            ]
            words += [f"xANSWER{number}x", f"xNEXT{number}x"]
    return messages, words


def prompt_of(name: str, messages: list[Any], tools: list[Any]) -> str:
    form = form_of(name)
    lacks = bool(tools) and hides_tools(form, messages)
    about = describe_tools(tools, None) if lacks else ""
    options: Any = {"text_parts": form.text_parts, "about_tools": about}
    found: list[Any] = normalise(messages, hoist_system=False, **options).messages
    if has_tools(found) and not form.takes_calls:
        found = write_as_text(found)
    return render(name, fit_messages(found, form), [] if lacks else fit_tools(tools, form))


@pytest.mark.parametrize("name", TEMPLATES)
@given(drawn=CONVERSATIONS)
def test_every_part_of_a_conversation_is_in_the_prompt(name: str, drawn: Any) -> None:
    system, rounds, with_tools = drawn
    messages, words = conversation(system, rounds)
    tools = [TOOL, BARE] if with_tools else []
    if name == "thoughts with calls alone":
        words += [f"xTHINK{i}x" for i, each in enumerate(rounds) if each["thought"]]
    if form_of(name).text_with_calls == "dropped":
        words = [word for word in words if "SAY" not in word]
    before = copy.deepcopy((messages, tools))
    text = prompt_of(name, messages, tools)
    assert (messages, tools) == before
    assert [word for word in words if word not in text] == []
    assert "None" not in text
    if with_tools:
        assert "leaf" in text
        assert "ping" in text


def test_a_call_without_text_gets_the_content_that_its_template_needs() -> None:
    """`{"role": "assistant", "content": null}` is what every client sends beside calls."""
    messages, _ = conversation(system=False, rounds=[])
    for content in (None, ""):
        call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}
        turn = {"role": "assistant", "content": content, "tool_calls": [call]}
        told = {"role": "tool", "tool_call_id": "a", "content": "x"}
        texts = {name: prompt_of(name, [*messages, turn, told], []) for name in TEMPLATES}
        assert "[call]find" in texts["no content beside calls"]
        assert "[assistant][][call]find" in texts["content beside calls"]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_reach_a_template_under_its_field_name(name: str) -> None:
    thought = {"role": "assistant", "content": "xSAYx", "reasoning_content": "xTHINKx"}
    source = TEMPLATES["any"].replace("reasoning_content", name)
    text = TemplateRenderer(source, {}).render([thought], [], {}, generation_prompt=False)
    assert "[assistant](xTHINKx)xSAYx" in text


def test_results_follow_their_calls_if_a_turn_can_have_one_call() -> None:
    messages, _ = conversation(
        False, [{"content": "say", "thought": True, "calls": 3, "id": "call_x", "answer": False}]
    )
    messages[-3:] = messages[:-4:-1]  # the client sends them in another order
    text = prompt_of("one call a turn", messages, [])
    order = [text.index(f"x0{kind}{j}x") for j in range(3) for kind in ("LEAF", "RESULT")]
    assert order == sorted(order)
    assert text.count("(xTHINK0x)") == text.count("xSAY0x") == 1


def test_short_call_ids_have_nine_letters_or_digits_and_are_unique() -> None:
    assert short_id("abcDEF123") == "abcDEF123"
    for odd in ("call_24f5c1e07a9b4d31", "äbcdefghi", "", "toolu_01", "abc-ef123"):
        found = short_id(odd)
        assert len(found) == 9
        assert found.isascii()
        assert found.isalnum()
        assert found == short_id(odd)
    assert len({short_id(f"call_{i}") for i in range(1000)}) == 1000


def test_user_text_after_a_result_fits_the_template() -> None:
    """Claude Code sends text beside its results."""
    second = {"role": "user", "content": "xAGAINx"}
    messages, _ = conversation(
        False, [{"content": None, "thought": False, "calls": 2, "id": "call_x", "answer": False}]
    )
    for told, ends in ((messages, "x0RESULT1x"), (messages[:-2], NO_RESULT)):
        form = form_of("users speak after answers")
        fitted = fit_messages(normalise([*told, second], hoist_system=False).messages, form)
        assert fitted[-1]["role"] == "tool"
        assert fitted[-1]["content"] == f"{ends}\n\nxAGAINx"
        text = prompt_of("users speak after answers", [*told, second], [])
        assert "[call]find" in text
        assert text.endswith(f"[result]{fitted[-1]['content']}\n[assistant]")


def test_calls_without_ids_are_numbered() -> None:
    messages, _ = conversation(
        False, [{"content": None, "thought": False, "calls": 2, "id": "call_x", "answer": True}] * 2
    )
    for message in messages:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
    fitted = fit_messages(normalise(messages, hoist_system=False).messages, form_of("short ids"))
    calls = [call["id"] for message in fitted for call in message.get("tool_calls", ())]
    assert len(set(calls)) == 4
    assert all(each == short_id(each) for each in calls)
    assert [m["tool_call_id"] for m in fitted if m["role"] == "tool"] == calls
    assert "[call]find" in prompt_of("short ids", messages, [])


def test_a_single_system_message_becomes_a_user_message_if_necessary() -> None:
    lone = [{"role": "system", "content": "xSYSTEMx"}]
    assert "[user]xSYSTEMx" in prompt_of("system messages beside others", lone, [])
    assert "[system]xSYSTEMx" in prompt_of("any", lone, [])


def test_null_fields_of_a_schema_are_left_out() -> None:
    schema = {"properties": {"a": {"description": None, "default": None, "enum": [None, 1]}}}
    function = {"name": "f", "parameters": schema}
    (tool,) = fit_tools([{"type": "function", "function": function}], TemplateForm())
    assert tool["function"]["parameters"]["properties"] == {
        "a": {"default": None, "enum": [None, 1]}
    }


def test_objects_at_any_depth_have_additional_properties() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "object"}}}
    closed = {"type": "object", "additionalProperties": False}
    schema = {"type": "object", "properties": {"a": inner, "c": closed}}
    function = {"name": "f", "parameters": schema}
    form = form_of("objects have additional properties")
    (tool,) = fit_tools([{"type": "function", "function": function}], form)
    found = tool["function"]["parameters"]["properties"]
    assert found["a"]["additionalProperties"] == {}
    assert found["a"]["properties"]["b"]["additionalProperties"] == {}
    assert found["c"] == closed


def test_type_lists_are_replaced_if_a_template_cannot_read_them() -> None:
    form = TemplateForm(type_lists=False)
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": ["integer", "null"], "enum": [["x", "y"]]},
            "b": {"type": "array", "items": {"type": ["string", "number"]}},
            "type": {"type": ["null"]},
        },
    }
    (tool,) = fit_tools(
        [{"type": "function", "function": {"name": "f", "parameters": schema}}], form
    )
    assert tool["function"]["parameters"]["properties"] == {
        "a": {"type": "integer", "enum": [["x", "y"]]},
        "b": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "number"}]}},
        "type": {"type": "null"},
    }


def test_a_system_message_that_some_turns_drop_is_moved_to_the_user_text() -> None:
    """Mistral Nemo's template writes it into the last message, where that is a user's."""
    own = "{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}"
    source = template(content=f"{own}{{{{ messages[0].content }}}} {{% endif %}}{TEXTS}")
    source = source.replace(
        "[{{ m.role }}]", "{% if m.role == 'system' %}{% continue %}{% endif %}"
    )
    backend = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    backend.chat_template = source
    tokenizer = HFTokenizer(backend)
    assert not has_system_role(tokenizer)
    backend.chat_template = TEMPLATES["any"]
    assert has_system_role(HFTokenizer(backend))


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("functions.x", "'functions' is undefined"),
        ("1 + messages", "TypeError: unsupported operand.*"),
    ],
)
def test_a_template_error_names_the_line(expression: str, complaint: str) -> None:
    renderer = TemplateRenderer(f"a\nb{{{{ {expression} }}}}", {})
    with pytest.raises(BadRequest, match=rf"{complaint} \(line 2 of the template\)"):
        renderer.render([{"role": "user", "content": "x"}], [], {}, generation_prompt=True)
