"""Requests as agents send them, to models whose templates are strict."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlx_provider.errors import BadRequest
from mlx_provider.protocol.requests import Sampling

DATA = Path(__file__).parents[1] / "data" / "requests"
STRICT = """\
{%- if messages[0].role == 'system' -%}{{ '<|im_start|>system\\n' }}
{%- if tools -%}Call one as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>{%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}{%- endif -%}
{{ messages[0].content ~ '<|im_end|>\\n' }}{%- endif -%}
{%- set last = namespace(role='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}
{{ raise_exception('System message must be at the beginning.') }}
{%- endif -%}
{%- else -%}
{%- if message.role == last.role and message.role == 'user' -%}
{{ raise_exception('Roles must alternate.') }}
{%- endif -%}
{%- set last.role = message.role -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>' ~ call.function.name }}
{%- for key, value in call.function.arguments.items() -%}
{{ '\\n' ~ key ~ ': ' ~ (value | tojson) }}
{%- endfor -%}
{{ '\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
"""System first, users never twice in a row, arguments iterated over."""
FIELDS = (
    "messages tools tool_choice parallel_tool_calls response_format stop n logprobs top_logprobs "
    "max_tokens"
).split()
NUMBERS = (
    "temperature top_p top_k min_p seed repetition_penalty presence_penalty frequency_penalty "
    "logit_bias"
).split()


def body(name: str) -> dict[str, Any]:
    (path,) = DATA.glob(f"{name}_*.json")
    found: dict[str, Any] = json.loads(path.read_text())["body"]
    return found


def fields(name: str, **changed: Any) -> dict[str, Any]:
    """The fields of a body, as in the engine's request."""
    sent = body(name)
    found = {key: sent[key] for key in FIELDS if key in sent}
    numbers = {key: sent[key] for key in NUMBERS if key in sent}
    if numbers:
        found["sampling"] = Sampling(**numbers)
    found["template"] = sent.get("chat_template_kwargs", {})
    if "max_completion_tokens" in sent:
        found["max_tokens"] = sent["max_completion_tokens"]
    return {**found, **changed}


@pytest.fixture(scope="session")
def strict(tiny: Any) -> Any:
    return tiny("qwen3", STRICT, max_position_embeddings=262144)


def texts(messages: list[dict[str, Any]], *roles: str) -> list[str]:
    found = []
    for message in messages:
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message["role"] in roles:
            found += [part["text"] for part in parts if part["type"] == "text"]
    return [text.strip() for text in found if text.strip()]


def test_01_system_messages_everywhere(strict: Any) -> None:
    asked = fields("01", max_tokens=4)
    messages, tools = asked["messages"], asked["tools"]
    prompt = strict.prompt_of(messages=messages, tools=tools)
    for text in texts(messages, "system", "user", "tool"):
        assert text in prompt
    answer = strict.ask(**asked)
    assert answer.only.reason == "length"
    follow = [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and"}]
    longer = strict.prompt_of(messages=follow, tools=tools)
    head = prompt.removesuffix("<|im_start|>assistant\n")
    assert longer.startswith(head), "a later turn leaves the beginning as it was"
    again = strict.ask(**{**asked, "messages": follow})
    assert again.usage.cached_tokens >= 0.95 * answer.prompt_tokens


def test_04_tool_results_of_many_kinds(strict: Any) -> None:
    asked = fields("04", max_tokens=4)
    prompt = strict.prompt_of(messages=asked["messages"], tools=asked["tools"])
    for text in texts(asked["messages"], "system", "user", "tool", "assistant"):
        assert text in prompt
    assert '\nfilePath: "a.py"\n' in prompt, "arguments are a mapping"
    order = [prompt.index(text) for text in ("A = 1", "B = 2", "screenshot:")]
    assert order == sorted(order)
    answer = strict.ask(**asked)
    assert answer.only.reason == "length"
    assert any("image omitted" in each for each in answer.warnings), "the model takes text only"


@pytest.mark.parametrize("arguments", ['{"filePath": ', "[1]", '"text"', "", None, {"a": 1}])
def test_04_arguments_that_are_no_object(strict: Any, arguments: Any) -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    assert strict.ask(messages=messages, max_tokens=2).only.reason == "length"


def test_06_a_strict_tool_with_references(strict: Any) -> None:
    asked = fields("06")
    schema = asked["tools"][0]["function"]["parameters"]
    drawn = Sampling(temperature=1, seed=14)  # a tree that ends
    choice = strict.ask(**{**asked, "max_tokens": 800, "sampling": drawn}).only
    assert choice.content.strip() == ""
    ((name, arguments),) = choice.arguments
    assert name == "save_tree"
    jsonschema.validate(arguments, schema)


THINKING = STRICT.replace(
    "assistant\\n' }}{%- endif -%}\n", "assistant\\n<think>\\n' }}{%- endif -%}"
)
QUIET = dict.fromkeys([*range(8), *range(336, 342)], -100.0)


@pytest.mark.parametrize("thinks", [False, True])
def test_07_a_schema_is_followed(tiny: Any, strict: Any, thinks: bool) -> None:
    model = tiny("qwen3", THINKING) if thinks else strict
    asked = fields("07")
    schema = asked["response_format"]["json_schema"]["schema"]
    more = {"thinking_budget": 20} if thinks else {}
    seeds = (8, 15) if thinks else (5, 21)  # replies that end early
    drawn = [Sampling(temperature=1, seed=seed, logit_bias=QUIET) for seed in seeds]
    started = [
        model.start(**{**asked, **more, "sampling": each, "max_tokens": 400}) for each in drawn
    ]
    whole = 0
    for generation in started:
        choice = model.read(generation).only
        assert bool(choice.reasoning) is thinks
        if choice.reason == "stop":
            jsonschema.validate(json.loads(choice.content), schema)
            whole += 1
    assert whole
    as_sent = model.ask(**{**asked, "max_tokens": 40}).only
    assert as_sent.reason in ("length", "stop")
    assert thinks or as_sent.content.lstrip().startswith("{")


def test_08_a_long_history_is_prefilled_once(tiny: Any) -> None:
    """With recurrent layers, whose state cannot be cut."""
    model = tiny("qwen3_5", STRICT, max_position_embeddings=262144)
    asked = fields("08b", max_tokens=4)
    asked["tools"] = asked["tools"][:1]
    longer = asked["messages"]
    for message in longer:  # nearly every byte is a token, so the beginnings are long enough
        message["content"] = message["content"] and message["content"][:40]
    first = model.ask(**{**asked, "messages": longer[:-2]})
    assert first.usage.cached_tokens == 0
    second = model.ask(**asked)
    assert second.usage.cached_tokens >= 0.95 * first.prompt_tokens
    model.client.cache_clear()
    cold = model.ask(**asked)
    assert cold.usage.cached_tokens == 0
    assert cold.only.content == second.only.content


def test_09_every_parameter_counts(strict: Any) -> None:
    asked = fields("09")
    answer = strict.ask(**asked)
    choice = answer.only
    assert choice.reason in ("length", "tool_calls")
    again = strict.ask(**asked).only
    assert (again.tokens, again.content, again.calls) == (
        choice.tokens,
        choice.content,
        choice.calls,
    ), "the seed repeats it"
    assert choice.logprobs
    assert all(len(each.top) == 3 for each in choice.logprobs)
    assert all(each.id != 5 for each in choice.logprobs)
    assert answer.usage.completion_tokens <= 64


def test_10a_the_reply_continues_the_assistants_message(strict: Any, tiny: Any) -> None:
    sent = body("10a")
    messages = [{"role": "system", "content": sent["system"]}, *sent["messages"]]
    prompt = strict.prompt_of(messages=messages)
    assert prompt.endswith("<|im_start|>assistant\n<answer>")
    assert prompt.count("<|im_start|>assistant") == 1
    answer = strict.ask(messages=messages, max_tokens=8, logprobs=True)
    raw = strict.ask(prompt=prompt, max_tokens=8, logprobs=True)
    assert answer.only.tokens == raw.only.tokens
    thinker = tiny("qwen3", THINKING)
    opened = thinker.prompt_of(messages=messages)
    assert opened.endswith("<think>\n\n</think>\n\n<answer>")
    assert thinker.ask(messages=messages, max_tokens=8).only.reasoning == ""
    held = thinker.ask(
        messages=messages, max_tokens=99, response_format={"type": "json_object"},
        sampling=Sampling(temperature=1, top_p=1, top_k=-1, seed=1),
    ).only  # fmt: skip
    assert held.content.lstrip().startswith("{")
    with pytest.raises(BadRequest, match="no turn before"):
        strict.start(messages=messages[2:])
    own = strict.prompt_of(messages=messages, continues=False)
    assert own.count("<|im_start|>assistant") == 2
    assert own.endswith("<answer><|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_writes_bos_gets_no_second_one(tiny: Any) -> None:
    model = tiny("llama")
    messages = [{"role": "user", "content": "hello"}]
    prompt_tokens = model.ask(messages=messages).prompt_tokens
    ids = model.served().model.tokenizer.encode(model.prompt_of(messages=messages), special=False)
    assert len(ids) == prompt_tokens
    assert ids.count(ids[0]) == 1
