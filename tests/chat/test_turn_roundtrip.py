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
from mlx_provider.chat.messages.tools_as_text import fold_tools, written_calls
from mlx_provider.chat.output.reply import Reply
from mlx_provider.chat.output.turn_layout import TurnLayout, layout_of
from mlx_provider.protocol.events import Delta
from tiny.tokenizers import QWEN

DEMO = Path(mlx_provider.demo.__file__).parent / "model"
TOOL_PARSERS = {parser.name: parser for parser in tool_plugin.mlx_tool_parsers()}
THOUGHTS = {parser.name: parser for parser in reasoning_plugin.mlx_reasoning_parsers()}


def turns(assistant: str, user: str, tool: str, begin: str) -> str:
    """A template of these turns; `m` is the message, `begin` the generation prompt."""
    return (
        "{%- set last = namespace(user=-1) -%}"
        "{%- for m in messages -%}{%- if m.role == 'user' -%}"
        "{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for m in messages -%}"
        "{%- set text = m.content or '' -%}{%- set thought = m.reasoning_content or '' -%}"
        "{%- set calls = m.tool_calls or [] -%}{%- set fresh = loop.index0 > last.user -%}"
        "{%- if m.role == 'user' -%}"
        + user
        + "{%- elif m.role == 'tool' -%}"
        + tool
        + "{%- else -%}"
        + assistant
        + "{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}" + begin + "{%- endif -%}"
    )


def chatml(assistant: str, begin: str = "") -> str:
    return turns(
        "{{ '<|im_start|>assistant\\n' }}" + assistant + "{{ '<|im_end|>\\n' }}",
        "{{ '<|im_start|>user\\n' ~ text ~ '<|im_end|>\\n' }}",
        "{{ '<|im_start|>user\\n<tool_response>\\n' ~ text ~ '\\n</tool_response><|im_end|>\\n' }}",
        "{{ '<|im_start|>assistant\\n' }}" + begin,
    )


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


CALLS = "{%- for c in calls -%}"
DONE = "{%- endfor -%}"

FORMATS = {
    "qwen3": Format(
        chatml(
            "{%- if thought and fresh -%}"
            "{{ '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ text.lstrip('\\n') }}"
            "{%- else -%}{{ text }}{%- endif -%}"
            + CALLS
            + "{%- if text or not loop.first -%}{{ '\\n' }}{%- endif -%}"
            '{{ \'<tool_call>\\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ '
            "(c.function.arguments | tojson) ~ '}\\n</tool_call>' }}" + DONE
        ),
        "hermes",
        "qwen3",
    ),
    "qwen3 whose prompt opens the thought": Format(
        chatml(
            "{%- if fresh -%}"
            "{{ '<think>\\n' ~ thought.strip('\\n') ~ '\\n</think>\\n\\n' ~ text.lstrip('\\n') }}"
            "{%- else -%}{{ text }}{%- endif -%}"
            + CALLS
            + "{%- if text or not loop.first -%}{{ '\\n' }}{%- endif -%}"
            '{{ \'<tool_call>\\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ '
            "(c.function.arguments | tojson) ~ '}\\n</tool_call>' }}" + DONE,
            "{{ '<think>\\n' }}",
        ),
        "hermes",
        "qwen3",
    ),
    "qwen3_coder": Format(
        chatml(
            "{%- if text.strip() -%}{{ text.strip() ~ '\\n' }}{%- endif -%}"
            + CALLS
            + "{{ ('\\n' if text.strip() or not loop.first else '') ~ '<tool_call>\\n<function=' ~ "
            "c.function.name ~ '>\\n' }}{%- for k, v in c.function.arguments.items() -%}"
            "{{ '<parameter=' ~ k ~ '>\\n' ~ v ~ '\\n</parameter>\\n' }}{%- endfor -%}"
            "{{ '</function>\\n</tool_call>' }}" + DONE
        ),
        "qwen3_coder",
    ),
    "tight": Format(
        chatml(
            "{%- if thought -%}{{ '<think>' ~ thought ~ '</think>' }}{%- endif -%}{{ text }}"
            + CALLS
            + '{{ \'<tool_call>\\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ '
            "(c.function.arguments | tojson) ~ '}\\n</tool_call>' }}" + DONE
        ),
        "hermes",
        "qwen3",
    ),
    "glm": Format(
        turns(
            "{{ '<|assistant|>' }}{%- if thought and fresh -%}"
            "{{ '\\n<think>' ~ thought.strip() ~ '</think>' }}{%- endif -%}"
            "{%- if text.strip() -%}{{ '\\n' ~ text.strip() }}{%- endif -%}"
            + CALLS
            + "{{ '\\n<tool_call>' ~ c.function.name ~ '\\n' }}"
            "{%- for k, v in c.function.arguments.items() -%}"
            "{{ '<arg_key>' ~ k ~ '</arg_key>\\n<arg_value>' ~ v ~ '</arg_value>\\n' }}"
            "{%- endfor -%}{{ '</tool_call>' }}" + DONE,
            "{{ '<|user|>\\n' ~ text }}",
            "{{ '<|observation|>\\n<tool_response>\\n' ~ text ~ '\\n</tool_response>' }}",
            "{{ '<|assistant|>' }}",
        ),
        "glm47",
        "glm4",
        end="",
    ),
    "deepseek_v31": Format(
        turns(
            "{{ '<｜Assistant｜></think>' ~ text }}"
            + CALLS
            + "{{ ('<｜tool▁calls▁begin｜>' if loop.first else '') ~ '<｜tool▁call▁begin｜>' ~ "
            "c.function.name ~ '<｜tool▁sep｜>' ~ (c.function.arguments | tojson) ~ "
            "'<｜tool▁call▁end｜>' ~ ('<｜tool▁calls▁end｜>' if loop.last else '') }}"
            + DONE
            + "{{ '<｜end▁of▁sentence｜>' }}",
            "{{ '<｜User｜>' ~ text }}",
            "{{ '<｜tool▁output▁begin｜>' ~ text ~ '<｜tool▁output▁end｜>' }}",
            "{{ '<｜Assistant｜></think>' }}",
        ),
        "deepseek_v31",
        end="<｜end▁of▁sentence｜>",
    ),
    "kimi_k2": Format(
        turns(
            "{{ '<|im_assistant|>assistant<|im_middle|>' }}"
            "{%- if thought -%}{{ '<think>' ~ thought ~ '</think>' }}{%- endif -%}{{ text }}"
            + CALLS
            + "{{ ('<|tool_calls_section_begin|>' if loop.first else '') ~ '<|tool_call_begin|>"
            "functions.' ~ c.function.name ~ ':' ~ loop.index0 ~ '<|tool_call_argument_begin|>' ~ "
            "(c.function.arguments | tojson) ~ '<|tool_call_end|>' ~ "
            "('<|tool_calls_section_end|>' if loop.last else '') }}" + DONE + "{{ '<|im_end|>' }}",
            "{{ '<|im_user|>user<|im_middle|>' ~ text ~ '<|im_end|>' }}",
            "{{ '<|im_system|>tool<|im_middle|>' ~ text ~ '<|im_end|>' }}",
            "{{ '<|im_assistant|>assistant<|im_middle|>' }}",
        ),
        "kimi_k2",
        "kimi_k2",
    ),
    "minimax_m2": Format(
        turns(
            "{{ ']~b]ai\\n' }}{%- if thought and fresh -%}"
            "{{ '<think>\\n' ~ thought ~ '\\n</think>\\n\\n' }}{%- endif -%}{{ text }}"
            "{%- if calls -%}{{ '\\n<minimax:tool_call>\\n' }}"
            + CALLS
            + "{{ '<invoke name=\"' ~ c.function.name ~ '\">\\n' }}"
            "{%- for k, v in c.function.arguments.items() -%}"
            "{{ '<parameter name=\"' ~ k ~ '\">' ~ v ~ '</parameter>\\n' }}{%- endfor -%}"
            "{{ '</invoke>\\n' }}" + DONE + "{{ '</minimax:tool_call>' }}{%- endif -%}"
            "{{ '[e~[\\n' }}",
            "{{ ']~b]user\\n' ~ text ~ '[e~[\\n' }}",
            "{{ ']~b]tool\\n<response>' ~ text ~ '</response>[e~[\\n' }}",
            "{{ ']~b]ai\\n<think>\\n' }}",
        ),
        "minimax_m2",
        "minimax_m2",
        end="[e~[",
    ),
    "mistral": Format(
        turns(
            "{{ text }}" + CALLS + "{{ '[TOOL_CALLS]' ~ c.function.name ~ '[ARGS]' ~ "
            "(c.function.arguments | tojson) }}" + DONE + "{{ '</s>' }}",
            "{{ '[INST]' ~ text ~ '[/INST]' }}",
            "{{ '[TOOL_RESULTS]' ~ text ~ '[/TOOL_RESULTS]' }}",
            "",
        ),
        "mistral",
        end="</s>",
    ),
    "ids before arguments": Format(
        turns(
            "{{ text }}" + CALLS + "{{ '[TOOL_CALLS]' ~ c.function.name ~ '[CALL_ID]' ~ c.id ~ "
            "'[ARGS]' ~ (c.function.arguments | tojson) }}" + DONE + "{{ '</s>' }}",
            "{{ '[INST]' ~ text ~ '[/INST]' }}",
            "{{ '[TOOL_RESULTS]' ~ m.tool_call_id ~ '[TOOL_CONTENT]' ~ text ~ '[/TOOL_RESULTS]' }}",
            "",
        ),
        "mistral_call_id",
        end="</s>",
    ),
    "ids behind arguments": Format(
        turns(
            "{%- if calls -%}{{ '[TOOL_CALLS][' }}"
            + CALLS
            + "{{ (c.function | tojson)[:-1] ~ ', \"id\": \"' ~ c.id ~ '\"}' }}"
            "{{ ']' if loop.last else ', ' }}" + DONE + "{%- else -%}{{ text }}{%- endif -%}"
            "{{ '</s>' }}",
            "{{ '[INST]' ~ text ~ '[/INST]' }}",
            '{{ \'[TOOL_RESULTS]{"content": \' ~ text ~ \', "call_id": "\' ~ m.tool_call_id ~ '
            "'\"}[/TOOL_RESULTS]' }}",
            "",
        ),
        "mistral_ids",
        end="</s>",
        both=False,
    ),
    "llama3": Format(
        turns(
            "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
            '{%- if calls -%}{{ \'{"name": "\' ~ calls[0].function.name ~ \'", "parameters": \' ~ '
            "(calls[0].function.arguments | tojson) ~ '}' }}{%- else -%}{{ text | trim }}"
            "{%- endif -%}{{ '<|eot_id|>' }}",
            "{{ '<|start_header_id|>user<|end_header_id|>\\n\\n' ~ (text | trim) ~ '<|eot_id|>' }}",
            "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' ~ text ~ '<|eot_id|>' }}",
            "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        ),
        "llama3_json",
        end="<|eot_id|>",
        most_calls=1,
        both=False,
    ),
    "granite": Format(
        turns(
            "{{ '<|start_of_role|>assistant<|end_of_role|>' ~ text }}"
            "{%- if calls -%}{{ '<|tool_call|>[' }}"
            + CALLS
            + "{{ ('' if loop.first else ', ') ~ '{\"name\": \"' ~ c.function.name ~ "
            "'\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}' }}"
            + DONE
            + "{{ ']' }}{%- endif -%}{{ '<|end_of_text|>\\n' }}",
            "{{ '<|start_of_role|>user<|end_of_role|>' ~ text ~ '<|end_of_text|>\\n' }}",
            "{{ '<|start_of_role|>tool<|end_of_role|>' ~ text ~ '<|end_of_text|>\\n' }}",
            "{{ '<|start_of_role|>assistant<|end_of_role|>' }}",
        ),
        "granite",
        end="<|end_of_text|>",
    ),
    "seed_oss": Format(
        turns(
            "{{ '<seed:bos>assistant\\n' }}{%- if thought -%}"
            "{{ '<seed:think>' ~ thought ~ '</seed:think>' }}{%- endif -%}{{ text }}"
            + CALLS
            + "{{ '\\n<seed:tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}"
            "{%- for k, v in c.function.arguments.items() -%}"
            "{{ '<parameter=' ~ k ~ '>' ~ v ~ '</parameter>\\n' }}{%- endfor -%}"
            "{{ '</function>\\n</seed:tool_call>' }}" + DONE + "{{ '<seed:eos>' }}",
            "{{ '<seed:bos>user\\n' ~ text ~ '<seed:eos>' }}",
            "{{ '<seed:bos>tool\\n' ~ text ~ '<seed:eos>' }}",
            "{{ '<seed:bos>assistant\\n' }}",
        ),
        "seed_oss",
        "seed_oss",
        end="<seed:eos>",
    ),
    "an answer behind a line end": Format(
        chatml(
            "{{ '\\n' ~ text }}" + CALLS + '{{ \'<tool_call>\\n{"name": "\' ~ c.function.name ~ '
            "'\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}\\n</tool_call>' }}" + DONE
        ),
        "hermes",
    ),
    "an answer behind a space": Format(
        turns(
            "{{ ' ' ~ text }}{%- if calls -%}{{ '[TOOL_CALLS] [' }}"
            + CALLS
            + "{{ ('' if loop.first else ', ') ~ '{\"name\": \"' ~ c.function.name ~ "
            "'\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}' }}"
            + DONE
            + "{{ ']' }}{%- endif -%}{{ '</s>' }}",
            "{{ '[INST] ' ~ text ~ ' [/INST]' }}",
            "{{ '[TOOL_RESULTS] ' ~ text ~ '[/TOOL_RESULTS]' }}",
            "",
        ),
        "mistral",
        end="</s>",
    ),
    "tiny qwen": Format(QWEN.template, "hermes", "qwen3"),
    "demo": Format((DEMO / "chat_template.jinja").read_text(encoding="utf-8"), "hermes"),
}
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
        layout=layout(form).behind(prompt, thoughts.openers() if thoughts else ()),
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
    written = written_calls(parser.call_grammar(), given, [each["id"] for each in made])
    assert written == outputs(form, "", "", 2)
    turn = {"role": "assistant", "content": "", "tool_calls": made}
    assert fold_tools([turn], parser)[0]["content"] == written


@pytest.mark.parametrize("name", FORMATS)
def test_white_space_that_the_template_can_write_comes_back(name: str) -> None:
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
            for before, after in product(SPACES, SPACES):
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


def test_a_continued_answer_keeps_its_first_space() -> None:
    form = FORMATS["an answer behind a space"]
    own = layout(form)
    assert own.turn_open == " "
    for begins, content in ((True, "there"), (False, " there")):
        reply = Reply(layout=own.behind("[INST] x [/INST]", (), begins=begins))
        deltas = reply.push_text(" there") + reply.finish("stop")[0]
        assert "".join(delta.content for delta in deltas) == content
