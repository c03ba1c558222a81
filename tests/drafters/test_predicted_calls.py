"""Calls that are predicted take fewer passes, and no token changes: any format, any company."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from byte_model import ENDS, byte_tokenizer
from mlx_provider import LoadOptions
from mlx_provider.chat.constraints.call_text import CallMatchers, CallPredictor
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.chat.output.reply import Reply
from mlx_provider.engine.engine import Engine
from mlx_provider.engine.request import Request, SamplingParams
from mlx_provider.engine.speculation.policy import Policy
from mlx_provider.engine.speculation.speculation import Source, Speculation
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.protocol.events import Delta
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import CallGrammar, Drafting, ReasoningParser, ToolParser
from mlx_provider.serving.structure import ThinkingBudget
from mlx_provider.testing.driver import Eager, TokenOutput, new_engine, new_request, output_of, run
from mlx_provider_drafters import ForcedText
from mlx_provider_drafters.lookup import Lookup
from quantised import quantise
from reciting import Reciting
from references import alone
from stepping import step_until, submit

VOCAB = 384
TOKENIZER = byte_tokenizer()
EOS = frozenset(TOKENIZER.token_to_id(end) for end in ENDS)
COMPILER = GrammarCompiler(TOKENIZER, EOS, VOCAB)
PARSER = ToolParser(
    "tagged", "<tool_call>", "</tool_call>", grammar=CallGrammar.json("<tool_call>", "</tool_call>")
)
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "whole": {"type": "boolean"}},
    "required": ["path", "whole"],
}
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}]
CALL = '<tool_call>{"name": "read_file", "arguments": {"path": "a.py", "whole": true}}</tool_call>'
REPLIES = {
    "a call": f"I read. {CALL}",
    "two calls": f"{CALL}\n{CALL}",
    "compact": CALL.replace(": ", ":").replace(", ", ","),
    "refused midway": CALL.replace("true", '"yes"') + f"\n{CALL}",
    "marker in prose": f"Write <tool_call> and {{}} for {CALL}",
    "no call": "There is nothing to read here, and so no call.",
}
LIKELIER = 6.0
"""So that logprobs tell what stands before a token."""
START = "read a.py\n"


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def text_of(replies: Sequence[str]) -> tuple[list[int], list[int]]:
    """A text with all replies, and the place of each."""
    text, places = ids(START), []
    for reply in replies:
        places.append(len(text))
        text += [*ids(reply), min(EOS)]
    return text, places


TEXT, PLACES = text_of(list(REPLIES.values()))
LENGTHS = [len(ids(reply)) for reply in REPLIES.values()]


def asked(at: int, *, predicted: bool = True, **more: Any) -> Request:
    request = new_request(
        TEXT[: PLACES[at]], max_tokens=LENGTHS[at], stop_tokens=EOS, logprobs=1, **more
    )
    tools = GenerateRequest(model="m", tools=TOOLS)
    matchers = CallMatchers(COMPILER, tools, PARSER)
    for row in request.rows:
        row.predictor = CallPredictor(matchers) if predicted else None
    return request


def everything(*, predicted: bool = True) -> list[Request]:
    """Every reply greedily, and two sampled choices of one request."""
    warm = SamplingParams(temperature=0.4, seed=7)
    made = [asked(at, predicted=predicted) for at in range(len(REPLIES))]
    return [*made, asked(0, predicted=predicted, params=warm, n=2)]


def drafting_engine(
    model: Any, drafting: Drafting, policy: Policy | None = None, **more: Any
) -> Engine:
    speculation = Speculation(Source(drafting), vocab=VOCAB, policy=policy, clock=lambda: 0.0)
    return new_engine(model, mixes=True, speculation=speculation, clock=lambda: 0.0, **more)


def assert_same(requests: Sequence[Request], others: Sequence[Request], near: float = 1e-4) -> None:
    """Tokens and logprobs are equal, as far as both have them."""
    assert tokens(requests) == tokens(others)
    for request, other in zip(requests, others, strict=True):
        for at in range(len(request.rows)):
            own, its = (output_of(each, at).logprobs for each in (request, other))
            assert [x.logprob for x in own] == pytest.approx([x.logprob for x in its], abs=near)


def tokens(requests: Sequence[Request]) -> list[list[int]]:
    return [row.tokens for request in requests for row in request.rows]


@pytest.fixture(params=["float32", pytest.param("bfloat16", marks=pytest.mark.sweep), "4 bit"])
def model(request: pytest.FixtureRequest, folder: Callable[..., Path]) -> Reciting:
    form = request.param
    path = folder("qwen3", **({"dtype": form} if form == "bfloat16" else {"seed": 9}))
    if form == "4 bit":
        path = quantise(path, "qwen3")
    return Reciting(load_text(path, LoadOptions()), TEXT, LIKELIER)


@pytest.fixture(scope="module")
def reciting(qwen3: TextModel) -> Reciting:
    return Reciting(qwen3, TEXT, LIKELIER)


def test_predicted_text_changes_no_token(model: Reciting) -> None:
    plain = everything(predicted=False)
    run(new_engine(model), *plain)
    together, apart = everything(), everything()
    run(drafting_engine(model, Lookup()), *together)
    for request in apart:
        run(drafting_engine(model, ForcedText()), request)
    near = 0.05 if model.model.layers[0].self_attn.q_proj.weight.dtype == mx.bfloat16 else 1e-3
    assert_same(together, plain, near)
    assert_same(apart, plain, near)
    *calls, proof = apart[: len(REPLIES)]
    assert min(request.accepted for request in calls) > 10
    assert proof.drafted == 0


def test_predicted_drafts_are_more_than_half_of_a_call(reciting: Reciting) -> None:
    for at in range(3):
        request = asked(at)
        run(drafting_engine(reciting, ForcedText()), request)
        assert tokens([request])[0] == TEXT[PLACES[at] :][: LENGTHS[at]]
        assert request.accepted > LENGTHS[at] / 2


def test_predictions_do_not_change_rows_that_join_wait_or_are_cancelled(reciting: Reciting) -> None:
    room = [10_000]
    engine = drafting_engine(
        reciting, ForcedText(), Eager(), reserve=4, max_chunk=64, available=lambda: room[0]
    )
    requests = everything()
    for request in requests:
        submit(engine, request, steps=4)
        if request is requests[2]:
            engine.cancel(requests[1])
    room[0] = 600
    step_until(engine, lambda: engine.scheduler.queued_jobs)
    room[0] = 10_000
    run(engine)
    assert requests.pop(1).rows[0].finish == "cancelled"
    assert_same(requests, [alone(reciting, request) for request in requests])
    assert sum(request.accepted for request in requests) > 50


def test_a_grammar_of_calls_that_cannot_be_compiled_ends_only_the_prediction(
    reciting: Reciting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(COMPILER, "calls", lambda *given: 1 / 0)
    request = asked(0)
    run(drafting_engine(reciting, ForcedText(), Eager()), request)
    assert tokens([request])[0] == TEXT[PLACES[0] :][: LENGTHS[0]]
    assert (request.rows[0].predictor, request.drafted) == (None, 0)


class Wrong:
    """Predicts what never comes."""

    def __init__(self) -> None:
        self.last = 0

    def likely(self) -> list[int]:
        return [(token + self.last) % 7 for token in range(7)]

    def advance(self, token: int) -> None:
        self.last = token


class Broken(Wrong):
    def advance(self, token: int) -> None:
        raise ValueError("a predictor of a plugin")


def test_an_always_wrong_predictor_is_soon_not_used(qwen3: TextModel) -> None:
    request = new_request(range(20, 40), max_tokens=80)
    request.rows[0].predictor = Wrong()
    policy = Policy()
    run(drafting_engine(qwen3, ForcedText(), policy), request)
    assert tokens([request]) == tokens([alone(qwen3, request)])
    assert 0 < request.drafted < 30
    later = new_request(range(20, 40), max_tokens=20)
    later.rows[0].predictor = Wrong()
    run(drafting_engine(qwen3, ForcedText(), policy), later)
    assert later.drafted == 0, "what other rows have shown counts, too"


def test_a_fault_of_a_predictor_costs_only_the_predictor(qwen3: TextModel) -> None:
    request = new_request(range(20, 40), max_tokens=20)
    request.rows[0].predictor = Broken()
    run(drafting_engine(qwen3, ForcedText()), request)
    assert tokens([request]) == tokens([alone(qwen3, request)])
    assert request.rows[0].predictor is None


class Written(TokenOutput):
    """Output that also reads the text."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self._reply = reply

    def push(self, token: int, logprob: Any = None) -> list[Delta]:
        self._reply.push_text(TOKENIZER.decode([token], skip_special_tokens=False))
        return super().push(token, logprob)


@pytest.mark.parametrize("budget", [3, 40])
def test_a_thinking_budget_ends_a_thought_as_without_predictors(
    reciting: Reciting, budget: int
) -> None:
    """The thought, which is a call, too, is cut where it is cut without drafts."""

    def thinking(*, predicted: bool) -> Request:
        request = asked(1, predicted=predicted)
        reply = Reply(
            reasoning_parser=ReasoningParser("think", "<think>", "</think>"), reasoning_open=True
        )
        (row,) = request.rows
        constraint = ThinkingBudget(budget, ids("</think>"), VOCAB, None)
        constraint.reply = reply
        row.constraint, row.output = constraint, Written(reply)
        return request

    plain, predicted = thinking(predicted=False), thinking(predicted=True)
    run(new_engine(reciting), plain)
    run(drafting_engine(reciting, ForcedText()), predicted)
    assert_same([predicted], [plain])
    assert output_of(plain).tokens[budget] == ids("</think>")[0]
    assert predicted.accepted > 10
