"""Text that a grammar forces takes fewer passes and changes no token."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from byte_model import ENDS, byte_tokenizer
from mlx_provider import LoadOptions
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.drafted_tokens import after_run
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import load_text
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import CallGrammar, Drafting, LoadedModel
from mlx_provider.testing.driver import new_engine, new_request, output_of, run
from mlx_provider_drafters import ForcedText
from mlx_provider_drafters.lookup import Lookup
from quantised import quantise
from schedules import Oracle, steps_of

VOCAB = 384
CALLS = CallGrammar.json("<tool_call>", "</tool_call>")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["now", "tomorrow"]}, "hot": {"type": "boolean"}},
            "required": ["kind", "hot"],
        },
    },
}
TOKENIZER = byte_tokenizer()
EOS = frozenset(TOKENIZER.token_to_id(end) for end in ENDS)
COMPILER = GrammarCompiler(TOKENIZER, EOS, VOCAB)


def constraint() -> Any:
    asked = GenerateRequest(
        model="m",
        messages=[{"role": "user", "content": "x"}],
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    structure = COMPILER.structure(asked, CALLS)
    return structure.constraint


def requests() -> list[Request]:
    """Two rows with a grammar, greedy and sampled, and one without."""
    greedy, sampled = SamplingParams(temperature=0), SamplingParams(seed=3)
    made = [
        new_request(range(20 + i, 40 + 3 * i), max_tokens=most, params=own, stop_tokens=EOS)
        for i, (own, most) in enumerate([(greedy, 120), (sampled, 120), (greedy, 50)])
    ]
    for request in made[:2]:
        request.rows[0].constraint = constraint()
    return made


def passes(model: LoadedModel, asked: Sequence[Request], drafting: Drafting | None) -> int:
    """Serve the requests, and count the steps."""
    speculation = drafting and Speculation(Source(drafting), vocab=VOCAB, clock=lambda: 0.0)
    engine = new_engine(model, speculation=speculation, clock=lambda: 0.0)
    return steps_of(engine, asked)


@pytest.fixture(params=["qwen3 bfloat16", "qwen3 4 bit", "qwen3_5_text", "gemma3_text"])
def model(request: pytest.FixtureRequest, folder: Callable[..., Path]) -> LoadedModel:
    family, _, form = request.param.partition(" ")
    path = folder(family, **({"dtype": form} if form == "bfloat16" else {"seed": 9}))
    if form == "4 bit":
        path = quantise(path, family)
    return load_text(path, LoadOptions())


def test_forced_text_changes_no_token(model: LoadedModel) -> None:
    plain = requests()
    passes(model, plain, None)
    often_wrong = Oracle(0.5, VOCAB)
    for request in plain:
        often_wrong.learn([*request.prompt.tokens, *output_of(request).tokens])
    for drafting in (ForcedText(), Lookup(), often_wrong):
        drafted = requests()
        passes(model, drafted, drafting)
        for one, other in zip(plain, drafted, strict=True):
            assert output_of(other).tokens == output_of(one).tokens
        assert all(request.accepted for request in drafted[:2])


def test_forced_text_takes_fewer_passes(qwen3: LoadedModel) -> None:
    plain, drafted = requests()[:1], requests()[:1]
    before, after = passes(qwen3, plain, None), passes(qwen3, drafted, ForcedText())
    call = TOKENIZER.decode(output_of(drafted[0]).tokens, skip_special_tokens=False)
    assert json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"]
    assert drafted[0].accepted == drafted[0].drafted
    assert before > 2.5 * after


def test_a_token_is_forced_only_if_the_grammar_allows_no_other() -> None:
    grammar, forced = constraint(), 0
    for token in TOKENIZER.encode(
        '<tool_call>{"name": "get_weather", "arguments": {"kind": "now", "hot": true}}</tool_call>',
        add_special_tokens=False,
    ).ids:
        run_, twin = grammar.forced_tokens(), grammar.fork()
        for each in run_:
            assert np.bitwise_count(twin.mask()).sum() == 1
            twin.advance(each)
        forced += bool(run_)
        grammar.advance(token)
    assert forced > 20


def test_forced_drafts_do_not_count_for_the_acceptance_rate(qwen3: LoadedModel) -> None:
    speculation = Speculation(Source(ForcedText()), vocab=VOCAB, clock=lambda: 0.0)
    engine = new_engine(qwen3, speculation=speculation, clock=lambda: 0.0)
    run(engine, requests()[0])
    assert not speculation.policy.sources[0].accepted


def test_drafts_continue_after_forced_tokens_only_if_they_begin_with_them() -> None:
    assert after_run([1, 2], [1, 2, 3]) == [1, 2, 3]
    assert after_run([1, 2], [1, 9, 3]) == [1, 2]
    assert after_run([1, 2], ()) == [1, 2]
