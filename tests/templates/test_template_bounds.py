"""A chat template is a program of a stranger's: it has bounds, and sees what upstream shows it."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_provider import BadRequest, UnsupportedModel
from mlx_provider.bounded_process import BoundedProcesses, ProcessEnded
from mlx_provider.families.tokenizer import template
from mlx_provider.families.tokenizer.template import TemplateRenderer

ASKED = [{"role": "user", "content": "xASKx \udc80 é <b>"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, object]] | None = None) -> str:
    renderer = TemplateRenderer(source, TOKENS)
    return renderer.render(
        messages or ASKED, [], {"more": {"b": [1, None]}}, generation_prompt=True
    )


NESTED = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x OP n.x %}{% endfor %}"
)
BOMBS = {
    "repeated text": "{{ 'a' * 3000000000 }}",
    "repeated list": "{{ [1, 2] * 300000000 }}",
    "wide format": "{{ '%4000000000d' % 3 }}",
    "width among the values": "{{ '%*d' % (4000000000, 3) }}",
    "format method": "{{ '{:>4000000000}'.format(3) }}",
    "format filter": "{{ '%4000000000d' | format(3) }}",
    "padding": "{{ 'a'.ljust(3000000000) }}",
    "centred": "{{ 'a' | center(3000000000) }}",
    "indented": "{{ [1] | tojson(indent=3000000000) }}",
    "power": "{{ 9 ** 999999999 }}",
    "doubled": DOUBLED.replace("OP", "+"),
    "joined": DOUBLED.replace("OP", "~"),
    "output": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_bomb_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.5)
    with pytest.raises(UnsupportedModel, match=r"chat template is refused: .*; put its maker"):
        render(BOMBS[name])
    assert render("{{ messages[0].content }}") == ASKED[0]["content"], "another one is served"


def test_other_templates_are_rendered_beside_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 1.5)
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(render, NESTED)
        assert render("x{{ bos_token }}") == "x<s>"
        assert not bomb.done()
        with pytest.raises(UnsupportedModel, match="takes too much processor time; put its maker"):
            bomb.result()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_x=1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ more.b.c.d }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
        "{% if %}",
    ],
)
def test_unsafe_template_expressions_are_refused_or_empty(source: str) -> None:
    try:
        text = render(source)
    except (BadRequest, UnsupportedModel) as refused:
        text = "" if "template" in refused.message else refused.message
    assert text in ("", "Undefined")


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n"
        "  {% endif %}{% endfor %}",
        "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}",
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}"
        "{{ n.a }}",
        "{{ dict(a=1) | tojson(indent=2) }}{{ dict.fromkeys(['a']) }}"
        "{{ more | tojson(sort_keys=true) }}",
        "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}"
        "{{ add_generation_prompt }}",
        "{{ messages[0].thinking }}{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}",
        "{{ '%s-%05d' % ('a', 3) }}{{ '{:>4}'.format(3) }}{{ 'a' | center(9) }}"
        "{{ 'a\nb' | indent(2) }}",
    ],
)
def test_a_template_renders_as_in_transformers(source: str) -> None:
    messages = [{**ASKED[0], "reasoning": "xTHINKx"}]
    ours = render(source, messages)
    (theirs,), _ = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=True,
        more={"b": [1, None]},
        **TOKENS,
    )
    assert ours == theirs


def test_a_template_that_wants_a_list_of_tools_gets_one() -> None:
    assert render("{% for tool in tools %}{% endfor %}{{ tools is none }}") == "False"


def test_template_processes_are_few_and_end_with_their_owner() -> None:
    owner = BoundedProcesses(template.PROGRAM, template.MEMORY, at_once=2)
    setups = {str(i): b'{"template": "%d", "source": "", "seconds": 1}' % i for i in range(200)}
    message = (
        b'{"template": "%d", "messages": [], "tools": [], "variables": {}, '
        b'"generation_prompt": false, "seconds": 1, "characters": 9}'
    )
    seen = set()
    for i in range(200):
        assert json.loads(owner.ask(message % i, {str(i): setups[str(i)]}))["text"] == ""
        seen.add(owner.idle[0].process.pid)
        assert len(owner.idle[0].setups) <= 64
    assert len(seen) == 4, "one that has many templates gives way to another"
    (running,) = owner.idle
    running.process.kill()
    running.process.wait()
    again = owner.ask(message % 1, {"1": setups["1"]})
    assert json.loads(again)["text"] == "", "another one starts"
    with pytest.raises(ProcessEnded):
        owner.ask(b"what", {})
    owner.ask(message % 1, {"1": setups["1"]})
    (running,) = owner.idle
    del owner
    assert running.process.wait(300) is not None
