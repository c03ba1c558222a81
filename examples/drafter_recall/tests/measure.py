"""How many drafts hold, and what that saves: `python tests/measure.py`.

The model in mlx-provider answers the same questions with each drafter: some are asked again, as by
whoever has a reply made anew; some differ in a word, as the calls of a tool do; some have nothing
in common. Its clock stands still, so that the costs that the engine assumes decide how many drafts
a pass takes, and the figures are the same on every machine.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_provider
from mlx_provider import LoadOptions
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.records import DraftOptions
from mlx_provider.registry import PluginRegistry
from mlx_provider.testing.driver import new_engine, new_request, output_of, run

MODEL = Path(mlx_provider.__file__).parent / "demo" / "model"
DRAFTERS = "lookup", "recall"
REPLY = 96
"""Tokens at most."""
CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Madrid", "Berlin", "Vienna"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TALK = ["Tell me a story.", "Hello!", "Who are you?", "Count from 3 to 9.", "What is 4 + 5?"]
QUESTIONS: dict[str, list[tuple[str, list[Any]]]] = {
    "asked again": [(text, []) for text in TALK * 4],
    "calls of one tool": [(f"What is the weather in {city}?", [WEATHER]) for city in CITIES],
    "nothing in common": [(text, []) for text in TALK],
}


def answered(model: Any, speculation: Speculation, kind: str) -> Iterator[tuple[int, int, int]]:
    """Of each question: tokens, drafts, and those that held."""
    engine = new_engine(model, speculation=speculation, clock=lambda: 0.0)
    for text, tools in QUESTIONS[kind]:
        messages = [{"role": "user", "content": text}]
        prompt = model.prepare(messages, tools=tools, media=[], variables={})
        request = new_request(
            prompt.tokens, max_tokens=REPLY, stop_tokens=frozenset(model.info.stop_tokens)
        )
        run(engine, request)
        yield len(output_of(request).tokens), request.drafted, request.accepted


def main() -> None:
    """A table in Markdown."""
    registry = PluginRegistry.discover()
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    model = registry.family_for(config)[0].load(MODEL, LoadOptions(dtype="float32"))
    print("| questions | drafter | tokens | drafts | held | tokens a pass |")
    print("|---|---|---|---|---|---|")
    for kind in QUESTIONS:
        for name in DRAFTERS:
            drafting = registry.drafter(name).start(MODEL, model, DraftOptions())
            speculation = Speculation(
                Source(drafting), vocab=model.info.vocab_size, clock=lambda: 0.0
            )
            tokens, drafts, held = map(sum, zip(*answered(model, speculation, kind), strict=True))
            pace = tokens / (tokens - held)
            print(f"| {kind} | {name} | {tokens} | {drafts} | {held} | {pace:.2f} |")


if __name__ == "__main__":
    main()
