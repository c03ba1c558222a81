"""Tokens per pass inside tool calls whose text is forced, foretold, or neither.

A model that recites writes the calls that the scenarios of `eval tools` want, one at a time through
the engine, in the Hermes format and with any tokenizer. What counts is the text behind the marker
of the first call. Passes are counted, not timed: reading tokens costs nothing here, and a draft as
little as the engine assumes before it has measured.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_provider import LoadOptions
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.chat.constraints.forecast import CallForecast, CallMatchers
from mlx_provider.chat.constraints.readable import written_calls
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import load_text
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import Drafting, ToolParser
from mlx_provider.testing.driver import new_engine, new_request, run
from mlx_provider_bench.report import Result, surroundings
from mlx_provider_drafters.lookup import ForcedText, Lookup
from mlx_provider_eval.scenario import read, shipped
from reciting import Reciting
from right_replies import right
from tiny import build

PARSER = ToolParser("hermes", "<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Plan:
    tokenizer: Path | None = None
    """A folder with tokenizer.json. `None`: the tokenizer of the tiny models."""
    most: int | None = None
    """Scenarios; `None`: all."""


@dataclass(frozen=True)
class Way:
    """What is drafted."""

    choice: str
    forced: bool = False
    """By the grammar, which is in force with `required`."""
    foretold: bool = False
    looked_up: bool = False


WAYS = (
    Way("required", forced=True),
    Way("required", forced=True, foretold=True),
    Way("auto"),
    Way("auto", looked_up=True),
    Way("auto", foretold=True),
    Way("auto", foretold=True, looked_up=True),
)


@dataclass(frozen=True)
class Turn:
    """A reply with nothing but calls."""

    tools: list[dict[str, Any]]
    prompt: list[int]
    reply: list[int]


def bench(plan: Plan) -> Result:
    with tempfile.TemporaryDirectory() as root:
        folder = build(Path(root) / "m", "qwen3", vocab_size=_size(plan))
        if plan.tokenizer is not None:
            shutil.copy(plan.tokenizer / "tokenizer.json", folder)
        model = load_text(folder, LoadOptions())
        fast = model.tokenizer.fast
        ends = [fast.token_to_id("<|im_end|>")]
        compiler = GrammarCompiler(fast, ends, model.info.vocab_size)
        turns = list(turns_of(fast, plan.most))
        rows = [{**asdict(way), **_played(model, compiler, turns, way)} for way in WAYS]
    return {
        "benchmark": "calls",
        "tokenizer": "tiny" if plan.tokenizer is None else "given",
        **surroundings("float32"),
        "replies": len(turns),
        "rows": rows,
    }


def _size(plan: Plan) -> int:
    """Rows of the output matrix."""
    if plan.tokenizer is None:
        return 384
    content = json.loads((plan.tokenizer / "tokenizer.json").read_text())
    return 1 + max([*content["model"]["vocab"].values(), *_added(content)])


def _added(content: dict[str, Any]) -> Iterator[int]:
    return (each["id"] for each in content["added_tokens"])


def turns_of(fast: Any, most: int | None) -> Iterator[Turn]:
    """The calls of the scenarios, with parameters in the order of their schemas."""
    for scenario in read(shipped())[:most]:
        tools = scenario.definitions()
        schemas = {f["name"]: f.get("parameters", {}) for f in (t["function"] for t in tools)}
        for step in scenario.steps:
            made = right(step.expect).calls
            if not made:
                continue
            calls = [
                (call.name, _ordered(json.loads(call.arguments), schemas[call.name]), {})
                for call in made
            ]
            text = written_calls(PARSER.call_grammar(), calls)
            prompt = "".join(f"{json.dumps(tool)}\n" for tool in tools)
            yield Turn(tools, _ids(fast, prompt), _ids(fast, text))


def _ordered(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    keys = dict.fromkeys([*schema.get("properties", {}), *arguments])
    return {key: arguments[key] for key in keys if key in arguments}


def _ids(fast: Any, text: str) -> list[int]:
    found: list[int] = fast.encode(text, add_special_tokens=False).ids
    return found


def _played(model: Any, compiler: GrammarCompiler, turns: Sequence[Turn], way: Way) -> Result:
    drafting: Drafting = Lookup() if way.looked_up else ForcedText()
    policy, tokens, drafted, accepted = Policy(), 0, 0, 0
    for turn in turns:
        asked = GenerateRequest(model="m", tools=turn.tools)
        request = new_request(turn.prompt, max_tokens=len(turn.reply))
        (row,) = request.rows
        if way.forced:
            structure = compiler.structure(
                asked.model_copy(update={"tool_choice": "required"}), PARSER.call_grammar()
            )
            row.constraint = structure and structure.constraint
        if way.foretold:
            row.forecast = CallForecast(CallMatchers(compiler, asked, PARSER))
        speculation = Speculation(
            Source(drafting), vocab=model.info.vocab_size, policy=policy, clock=lambda: 0.0
        )
        reciting = Reciting(model, [*turn.prompt, *turn.reply], 100.0)
        engine = new_engine(reciting, speculation=speculation, clock=lambda: 0.0, max_chunk=4096)
        engine.submit(request)
        run(engine)
        if row.tokens != turn.reply:
            raise RuntimeError("drafts have changed a reply")
        tokens += len(turn.reply) - 1
        drafted += request.drafted
        accepted += request.accepted
    passes = tokens - accepted
    return {
        "tokens": tokens,
        "passes": passes,
        "per_pass": round(tokens / passes, 2),
        "held": round(accepted / max(1, drafted), 2),
    }
