"""Thoughts: opened by the template or by the model, ended by a budget, followed by a grammar."""

import json
from typing import Any

import pytest

from mlx_provider.chat.output.turn_layout import TurnLayout
from mlx_provider.protocol.requests import ModelOptions, Sampling
from mlx_provider.serving.structure import ThinkingBudget

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}
PING = {"type": "function", "function": {"name": "ping"}}


MARKERS = [*range(8), *range(336, 342)]
"""Special and added tokens of the tiny tokenizer."""


def template(opener: str, closer: str) -> str:
    """A template that opens a thought unless that is switched off, and that shows its variables."""
    return (
        '{%- if tools -%}Call one as <tool_call>\n{"name": ...}\n</tool_call>{%- endif -%}'
        "{%- for message in messages -%}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{%- endfor -%}"
        "{%- if note is defined -%}note: {{ note }}\n{%- endif -%}"
        "<|im_start|>assistant\n"
        "{%- if enable_thinking is not defined or enable_thinking -%}"
        f"{opener}\n{{%- else -%}}{opener}\n\n{closer}\n\n{{%- endif -%}}"
    )


FORMATS = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
"""The second one is many tokens to the tiny tokenizer."""


@pytest.fixture(params=FORMATS, ids=["one-token", "many-tokens"])
def thinker(request: pytest.FixtureRequest, tiny: Any) -> Any:
    return tiny("qwen3", template(*request.param))


def warm(seed: int) -> Sampling:
    """Sampling without special tokens, except those that the grammar forces."""
    return Sampling(temperature=1, seed=seed, logit_bias=dict.fromkeys(MARKERS, -100.0))


def spent(answer: Any, budget: int, marker: int) -> None:
    """The thought has ended with its budget, apart from the tokens of the marker."""
    assert answer.only.reasoning
    assert budget <= answer.usage.reasoning_tokens <= budget + marker


@pytest.mark.parametrize("seeds", [2, pytest.param(16, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("budget", [1, 7, 20])
def test_a_budget_ends_the_thought(thinker: Any, budget: int, seeds: int) -> None:
    for seed in range(seeds):
        answer = thinker.ask(sampling=warm(seed), thinking_budget=budget, max_tokens=60)
        spent(answer, budget, 10)
        assert answer.only.content
        assert "THINK]" not in answer.only.content + answer.only.reasoning
        assert "think>" not in answer.only.content + answer.only.reasoning
        assert answer.only.reason == "length"


def test_a_thinking_budget_of_zero_gives_no_reasoning(thinker: Any) -> None:
    answer = thinker.ask(sampling=warm(1), thinking_budget=0, max_tokens=40)
    assert answer.only.reasoning == ""
    assert answer.only.content
    assert answer.usage.reasoning_tokens <= 10


def test_without_a_budget_the_model_continues_to_think(thinker: Any) -> None:
    answer = thinker.ask(sampling=warm(1), max_tokens=60)
    assert answer.only.content == ""
    assert answer.usage.reasoning_tokens == 60
    assert answer.only.reason == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_a_thinking_budget_ends_the_thought_before_a_schema(thinker: Any, n: int) -> None:
    for seed in range(3):
        answer = thinker.ask(
            sampling=warm(seed), thinking_budget=12, response_format=FORMAT, max_tokens=200, n=n
        )
        for choice in answer.choices:
            assert choice.reason == "stop"
            assert choice.reasoning
            assert set(json.loads(choice.content)) == {"x"}


def test_a_thinking_budget_ends_the_thought_before_a_required_call(thinker: Any) -> None:
    for seed in range(3):
        choice = thinker.ask(
            sampling=warm(seed), thinking_budget=12, tools=[PING], tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=700,
        ).only  # fmt: skip
        assert choice.reason == "tool_calls"
        assert choice.reasoning
        assert choice.content.strip() == ""
        assert choice.arguments[0] == ("ping", {})


def test_template_variables_of_a_request_reach_the_template(thinker: Any) -> None:
    messages = [{"role": "user", "content": "x"}]
    opened = thinker.prompt_of(messages=messages)
    closed = thinker.prompt_of(messages=messages, template={"enable_thinking": False})
    noted = thinker.prompt_of(messages=messages, template={"note": "be quick"})
    assert opened.endswith(("<think>", "[THINK]"))
    assert closed.rstrip().endswith(("</think>", "[/THINK]"))
    assert "note: be quick" in noted


def test_with_thinking_switched_off_all_text_is_content(thinker: Any) -> None:
    answer = thinker.ask(template={"enable_thinking": False}, max_tokens=30, sampling=warm(1))
    assert answer.only.reasoning == ""
    assert answer.only.content
    assert answer.usage.reasoning_tokens == 0
    held = thinker.ask(
        template={"enable_thinking": False}, max_tokens=60, response_format=FORMAT, sampling=warm(2)
    )
    assert set(json.loads(held.only.content)) == {"x"}


def test_reasoning_is_the_same_streamed_or_not(thinker: Any) -> None:
    """Events joined while a slow reader waits, and events read one by one."""
    given = {"sampling": warm(4), "thinking_budget": 10, "max_tokens": 40}
    streamed = thinker.ask(**given)
    generation = thinker.start(**given)
    while not generation.events.ended:
        pass
    joined = thinker.read(generation)
    assert joined.deltas < streamed.deltas or streamed.deltas <= 2
    for part in ("reasoning", "content", "reason"):
        assert getattr(joined.only, part) == getattr(streamed.only, part)


def test_text_before_a_closer_is_reasoning_in_a_format_that_always_thinks(tiny: Any) -> None:
    """Formats that always think: text before any closer is thought, unless the prompt closed it."""
    plain = template("<think>", "</think>").replace("<think>\n{%- else", "{%- else")
    model = tiny("qwen3", plain)
    always = ModelOptions(reasoning_parser="deepseek_r1")
    answer = model.ask(options=always, thinking_budget=5, max_tokens=30, sampling=warm(1))
    assert answer.only.reasoning
    assert answer.only.content
    closed = model.ask(options=always, template={"enable_thinking": False}, max_tokens=10)
    assert closed.only.reasoning == ""
    maybe = model.ask(options=ModelOptions(reasoning_parser="qwen3"), max_tokens=10)
    assert maybe.only.reasoning == ""


class Thinking:
    in_reasoning = True


def test_a_marker_is_forced_only_inside_a_thought() -> None:
    """In the content, a token equal to the marker's first one does not start the marker."""
    state = Thinking()
    budget = ThinkingBudget(2, [5, 6], 40, None)
    budget.reply = state  # type: ignore[assignment]
    for token in (1, 2):
        assert budget.mask() is None
        budget.advance(token)
    state.in_reasoning = False  # the model has closed it within the budget
    for token in (5, 1, 5, 6):
        assert budget.mask() is None
        budget.advance(token)
    state.in_reasoning = True
    for token in (5, 6):
        assert budget.mask().tolist() == [1 << token, 0]
        assert budget.mask().tolist() == [1 << token, 0], "asking twice changes nothing"
        budget.advance(token)
    state.in_reasoning = False
    assert budget.mask() is None


def test_a_model_is_served_with_the_layout_of_its_template(tiny: Any) -> None:
    """White space that the template writes by itself is left out of a reply's texts."""
    served = tiny("qwen3").served()
    assert served.layout == TurnLayout("\n", "\n", "\n", "\n", "")
