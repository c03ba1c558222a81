"""While the tools of a turn run, the engine prefills the beginning of the next prompt."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from mlx_provider.protocol.health import EngineStats
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import Prompt
from mlx_provider.serving.next_prompt import ToolTurn, known_head
from mlx_provider.serving.prompt import render_prompt
from tolerances import logprob_tolerance
from waiting import PATIENCE

TURNS = """\
{%%- if tools -%%}{{ '<|im_start|>system\\n' ~ (tools | tojson) ~ '<|im_end|>\\n' }}{%%- endif -%%}
{%%- set last = namespace(user=-1) -%%}
{%%- for m in messages if m.role == 'user' -%%}{%%- set last.user = loop.index0 -%%}{%%- endfor -%%}
{%%- for m in messages -%%}
{%%- if m.role == 'tool' -%%}
{{ '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}
{%%- else -%%}
{{ '<|im_start|>' ~ m.role ~ '\\n' }}
{%%- if m.reasoning_content and loop.index0 > last.user -%%}
{{ '<think>\\n' ~ m.reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' }}
{%%- endif -%%}
{{ m.content or '' }}
{%%- for c in m.tool_calls or [] -%%}%s{%%- endfor -%%}
{{ '<|im_end|>\\n' }}
{%%- endif -%%}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}
{{ '<|im_start|>assistant\\n<think>\\n' ~ ('\\n</think>\\n\\n' if enable_thinking is false) }}
{%%- endif -%%}
"""
JSON = TURNS % (
    """{{ '<tool_call>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ """
    "(c.function.arguments | tojson) ~ '}\\n</tool_call>' }}"
)
"""As Qwen3 writes turns."""
TAGS = TURNS % (
    "{{ '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}"
    "{%%- for k, v in c.function.arguments.items() -%%}"
    "{{ '<parameter=' ~ k ~ '>\\n' ~ v ~ '\\n</parameter>\\n' }}{%%- endfor -%%}"
    "{{ '</function>\\n</tool_call>' }}".replace("%%", "%")
).replace("%%", "%")
"""As Qwen3.5 does."""
ARGUMENTS = {"path": "src/main.py", "text": "print('a change of the whole file')\n" * 2}
WRITTEN = {
    JSON: json.dumps({"name": "write", "arguments": ARGUMENTS}, separators=(",", ":")),
    TAGS: "<function=write>\n"
    + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in ARGUMENTS.items())
    + "</function>",
}
"""The same call; as JSON without the spaces that the template writes."""
STRINGS = {name: {"type": "string"} for name in ARGUMENTS}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "write", "parameters": {"type": "object", "properties": STRINGS}},
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "write", "arguments": "{}"}}
RESULT = "The file was written, and the tests passed. " * 6
ASKED = [{"role": "user", "content": "Change it, please. " * 8}]


def ask(model: Any, messages: list[Any], text: str = "", **more: Any) -> Any:
    """Ask a model that thinks for a few tokens, and then writes `text` as a call."""
    inside = json.dumps(f"\n{text}\n")
    call = f"start: <tool_call> {inside} </tool_call>"
    grammar = {"type": "lark", "value": call} if text else None
    given = {"tools": TOOLS, "grammar": grammar, "thinking_budget": 40, "logprobs": True, **more}
    return model.ask(messages=messages, max_tokens=900 if text else 12, **given)


def history(messages: list[Any], choice: Any, *, thoughts: bool) -> list[Any]:
    """The history as a client sends it, with a result for each call."""
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in zip(choice.ids, choice.calls, strict=True)
    ]
    turn = {"role": "assistant", "content": choice.content or None, "tool_calls": calls}
    if thoughts:
        turn["reasoning_content"] = choice.reasoning
    results = [{"role": "tool", "tool_call_id": i, "content": RESULT} for i in choice.ids]
    return [*messages, turn, *results]


def stats(model: Any) -> EngineStats:
    (found,) = model.service.stats().engines
    return found


def await_heads(model: Any) -> None:
    """Wait until the next prompt's beginning is rendered and prefilled."""
    worker, engine = model.service.worker, model.served().engine

    def await_rest() -> None:
        while worker.call(lambda: bool(worker._idle_calls) or not engine.idle).result(PATIENCE):
            pass

    await_rest()
    model.service.next_prompts._pool.submit(int).result(PATIENCE)
    await_rest()


@pytest.fixture
def own(own_model: Any, build_tiny: Any) -> Any:
    return lambda family, template: own_model(build_tiny(family, template))


@pytest.mark.parametrize(("family", "template"), [("qwen3", JSON), ("qwen3_5_text", TAGS)])
def test_the_next_request_computes_only_its_tool_result(
    own: Any, family: str, template: str
) -> None:
    model = own(family, template)
    encode = model.served().model.tokenizer.encode_plain
    messages = ASKED
    for _ in range(2):
        first = ask(model, messages, WRITTEN[template], session="s", salt="a").only
        assert first.reason == "tool_calls"
        assert first.arguments == [("write", ARGUMENTS)]
        await_heads(model)
        ahead = stats(model).background_tokens
        messages = history(messages, first, thoughts=False)
        then = ask(model, messages, salt="a")
        computed = then.prompt_tokens - then.usage.cached_tokens
        assert computed <= 1.1 * len(encode(RESULT)), "thoughts and calls were computed before"
        cold = ask(model, messages, salt=f"b{ahead}")
        assert cold.usage.cached_tokens == 0, "another tenant's"
        assert then.only.tokens == cold.only.tokens
        assert [each.logprob for each in then.only.logprobs] == pytest.approx(
            [each.logprob for each in cold.only.logprobs], abs=logprob_tolerance()
        )
    await_heads(model)
    ahead = stats(model).background_tokens
    assert (
        f"mlx_provider_background_prompt_tokens_total {float(ahead)}"
        in model.service.metrics().decode()
    )


def turn(model: Any, messages: list[Mapping[str, Any]], reasoning: str) -> ToolTurn:
    wire = GenerateRequest(model=model.model, messages=messages, tools=TOOLS)
    return ToolTurn(wire, model.served(), "", reasoning, [CALL, {**CALL, "id": "call_2"}])


def test_both_beginnings_are_prefilled_until_a_client_returns_or_drops_thoughts(qwen: Any) -> None:
    for thoughts, earlier, expected in (
        ("", [], [False]),
        ("Hm.", [], [True, False]),
        ("Hm.", ["Ha."], [True]),
        ("Hm.", ["", "Ha."], [True]),
        ("Hm.", [""], [False]),
    ):
        before: list[Any] = [*ASKED]
        for each in earlier:
            said = {"role": "assistant", "content": None, "tool_calls": [CALL]}
            before += [{**said, "reasoning_content": each}, {"role": "tool", "content": RESULT}]
        shown = [
            "reasoning_content" in messages[len(before)]
            for messages in turn(qwen, before, thoughts).histories()
        ]
        assert shown == expected, (thoughts, earlier)


def test_the_prefilled_part_ends_before_tokens_that_a_result_can_change(qwen: Any) -> None:
    """Also if a result merges with the line end before it, and with several results."""
    made = turn(qwen, ASKED, "")
    (messages,) = made.histories()
    view = qwen.served()

    def tokens(result: str | None = None) -> Prompt:
        told = [
            m if m["role"] != "tool" or result is None else {**m, "content": result}
            for m in messages
        ]
        return render_prompt(view, made.wire.model_copy(update={"messages": told})).prompt

    head = known_head(tokens(), view.model.tokenizer)
    assert head is not None
    for result in ("x", "\n\nx", "  x", '{"a": 1}', ""):
        assert tokens(result).tokens[: len(head.tokens)] == head.tokens
    shown = view.model.tokenizer.decode(head.tokens, skip_special=False)
    assert shown.endswith("<|im_start|>tool")
