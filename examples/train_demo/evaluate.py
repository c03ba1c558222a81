#!/usr/bin/env python
"""Ask the held-out questions and count the answers that match to the letter.

    python evaluate.py --base-url http://127.0.0.1:8080/v1 --key KEY --model NAME
    python evaluate.py --direct ../../mlx_provider/demo/model

The first asks an OpenAI-compatible server, pictures as PNG data URLs; the second loads the folder
with mlx_vlm. Both decode greedily. The last line printed is the result as JSON.
"""

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from corpus import Conversation, heldout
from pictures import draw, png_data_url

MAX_TOKENS = 256  # more than the longest answer


@dataclass
class Answer:
    """What came back: text, calls as (name, arguments), and whether the model ended by itself."""

    text: str
    calls: list[tuple[str, dict]] = field(default_factory=list)
    ended: bool = True


Ask = Callable[[Conversation], Answer]


def call_text(message: dict) -> str:
    """The text the model writes for the calls of a message."""
    calls = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}\n'
        "</tool_call>"
        for call in (item["function"] for item in message["tool_calls"])
    ]
    return "\n".join(calls)


def is_right(expected: dict, answer: Answer) -> bool:
    """Exact match; calls by name and arguments where the server parsed them."""
    if not answer.ended:
        return False
    if "tool_calls" not in expected:
        return not answer.calls and answer.text.strip() == expected["content"].strip()
    if answer.calls:
        functions = [item["function"] for item in expected["tool_calls"]]
        wanted = [(function["name"], function["arguments"]) for function in functions]
        return answer.calls == wanted and not answer.text.strip()
    return answer.text.strip() == call_text(expected)


def request_messages(case: Conversation) -> list[dict]:
    """The messages before the expected answer, as the OpenAI API takes them."""
    pictures = iter(case.pictures)
    numbers = itertools.count()
    messages, last_id = [], ""
    for message in map(dict, case.messages[:-1]):
        if isinstance(message["content"], list):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": png_data_url(next(pictures))}}
                if part["type"] == "image"
                else part
                for part in message["content"]
            ]
        if "tool_calls" in message:
            last_id = f"call_{next(numbers)}"
            function = message["tool_calls"][0]["function"]
            function = function | {"arguments": json.dumps(function["arguments"])}
            message["content"] = None
            message["tool_calls"] = [{"id": last_id, "type": "function", "function": function}]
        if message["role"] == "tool":
            message["tool_call_id"] = last_id
        messages.append(message)
    return messages


def _arguments(text: str) -> dict:
    try:
        return json.loads(text)
    except ValueError:
        return {"not JSON": text}


def from_server(base_url: str, key: str, model: str) -> Ask:
    """Ask an OpenAI-compatible server."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key=key)

    def ask(case: Conversation) -> Answer:
        choice = client.chat.completions.create(
            model=model,
            messages=request_messages(case),
            temperature=0,
            max_tokens=MAX_TOKENS,
            **({"tools": case.tools} if case.tools else {}),
        ).choices[0]
        calls = [
            (call.function.name, _arguments(call.function.arguments))
            for call in choice.message.tool_calls or []
        ]
        ended = choice.finish_reason in ("stop", "tool_calls")
        return Answer(choice.message.content or "", calls, ended)

    return ask


def from_folder(folder: Path) -> Ask:
    """Ask a checkpoint folder through mlx_vlm."""
    from mlx_vlm import generate, load

    model, processor = load(str(folder))

    def ask(case: Conversation) -> Answer:
        prompt = processor.tokenizer.apply_chat_template(
            case.messages[:-1], tools=case.tools, add_generation_prompt=True, tokenize=False
        )
        result = generate(
            model,
            processor,
            prompt,
            image=[draw(picture) for picture in case.pictures] or None,
            max_tokens=MAX_TOKENS,
            temperature=0.0,
            verbose=False,
        )
        return Answer(result.text, ended=result.generation_tokens < MAX_TOKENS)

    return ask


def _miss(case: Conversation, answer: Answer) -> str:
    *_, question, expected = case.messages
    wanted = call_text(expected) if "tool_calls" in expected else expected["content"]
    asked = json.dumps(question["content"])[-120:]
    return f"MISS {case.task} | {asked} | wanted {wanted!r} | got {answer.text!r} {answer.calls}"


def evaluate(ask: Ask, cases: list[Conversation], show: int) -> dict[str, list[int]]:
    """task -> [right, asked]; prints up to `show` misses of each task."""
    right, asked, shown = Counter(), Counter(), Counter()
    for case in cases:
        answer = ask(case)
        asked[case.task] += 1
        if is_right(case.messages[-1], answer):
            right[case.task] += 1
        elif shown[case.task] < show:
            shown[case.task] += 1
            print(_miss(case, answer), flush=True)
    return {task: [right[task], total] for task, total in asked.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--base-url", help="an OpenAI-compatible server, with its /v1")
    where.add_argument("--direct", type=Path, help="a checkpoint folder, asked through mlx_vlm")
    parser.add_argument("--key", default="none")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--per-task", type=int, default=60)
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--tasks", nargs="*", help="only these tasks")
    parser.add_argument("--show", type=int, default=2, help="misses to print of each task")
    args = parser.parse_args()
    if args.direct:
        ask = from_folder(args.direct)
    else:
        ask = from_server(args.base_url, args.key, args.model)
    cases = heldout(args.seed, args.per_task)
    if args.tasks:
        cases = [case for case in cases if case.task in args.tasks]
    start = time.time()
    tasks = evaluate(ask, cases, args.show)
    for task, (right, total) in tasks.items():
        print(f"{task:16s} {right:4d}/{total:<4d} {100 * right / total:5.1f} %")
    result = {
        "right": sum(right for right, _ in tasks.values()),
        "asked": sum(total for _, total in tasks.values()),
        "seconds": round(time.time() - start, 1),
        "tasks": tasks,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
