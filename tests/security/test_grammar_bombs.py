"""Grammars that no compiler can hold: refused with a reason, and nobody else is touched."""

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from byte_model import ENDS, byte_tokenizer
from mlx_provider.chat.constraints import trial as grammar_trial
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.chat.constraints.patterns import whole_text
from mlx_provider.chat.constraints.trial import Allowance, GrammarTrial
from mlx_provider.errors import BadRequest, GrammarFailed, RequestFailed
from mlx_provider.litellm.call import Call, generate_requests
from mlx_provider.litellm.errors import to_litellm
from mlx_provider.protocol.event_queue import EventQueue
from mlx_provider.protocol.events import Delta, Done, Event, Failed
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import CallGrammar
from mlx_provider.serving.service import ChatService
from mlx_provider.settings import EngineSettings
from mlx_provider_tool_parsers import mlx_tool_parsers

PARSERS = {parser.name: parser for parser in mlx_tool_parsers()}
MESSAGES = [{"role": "user", "content": "x"}]
LATE = 'start: /[ab]{40}/ tail\ntail: (("c"{1000}){1000}){1000}'
"""Gives up once forty letters are written."""


def regex(value: str) -> dict[str, Any]:
    return {"grammar": {"type": "regex", "value": value}}


def lark(value: str) -> dict[str, Any]:
    return {"grammar": {"type": "lark", "value": value}}


def schema(value: Any) -> dict[str, Any]:
    inner = {"name": "n", "schema": value, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


def strict_tool(value: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": value, "strict": True}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def chain(links: int) -> str:
    rules = [f'r{i}: "a" r{i + 1} | "b" r{i + 1}' for i in range(links)]
    return "\n".join(["start: r0", *rules, f'r{links}: "x"'])


def reference_chain(links: int) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        return {"properties": {"x": {"$ref": f"#/$defs/a{i}"}}, "required": ["x"]}

    defs = {f"a{i}": {"type": "object", **link(i + 1)} for i in range(links)}
    return {"type": "object", **link(0), "$defs": defs | {f"a{links}": {"type": "string"}}}


OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "repeats of repeats": (regex("((a{1000}){1000}){1000}"), "too many expressions|takes"),
    "a long alternative": (
        regex("|".join(f"(choice {i})" for i in range(100_000))),
        "longer than 1000000|too big",
    ),
    "brackets in brackets": (regex("(" * 5000 + "a" + ")" * 5000), "nested"),
    "a rule that is itself": (lark("start: start"), "no text at all fits it"),
    "a long chain of rules": (lark(chain(10_000)), "nested too deep"),
    "rules of repeats": (lark('start: (("a"{1000}){1000}){1000}'), "Too many items"),
    "a long text": (lark('start: "a"\n' + "// x\n" * 300_000), "longer than 1000000"),
    "optional properties": (schema(OPTIONAL), "items; max is 2000"),
    "a chain of references": (schema(reference_chain(3000)), "nested too deep"),
    "a cycle of references": (schema(CYCLE), "no text at all fits it"),
    "a huge enum": (schema({"enum": [f"value {i}" for i in range(100_000)]}), "longer|too big"),
    "a huge constant": (schema({"const": "x" * 900_000}), "too many|takes|too long"),
    "a huge pattern": (schema({"type": "string", "pattern": "a" * 2_000_000}), "longer than"),
}
ENDLESS = (
    lark("start: X\nX: " + " & ".join(f"/(.{{{n}}})*/" for n in (97, 89, 83, 79, 73, 71))),
    schema({"type": "integer", "multipleOf": 999_983}),
)
PATTERN = {"type": "string", "pattern": "^((a{999}){999}){999}$"}
TOOL_BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "optional parameters": (OPTIONAL, "items; max is 2000"),
    "a chain of references": (reference_chain(3000), "nested too deep"),
    "a pattern": ({"properties": {"a": PATTERN}, "required": ["a"]}, "too many expressions|takes"),
}


def request(**given: Any) -> GenerateRequest:
    return GenerateRequest(model="demo", messages=MESSAGES, **{"max_tokens": 60, **given})


@pytest.fixture(scope="module")
def service() -> Iterator[ChatService]:
    made = ChatService(EngineSettings())
    yield made
    made.close()


class Reader:
    """Events of one request, as a client sees them."""

    def __init__(self, service: ChatService, asked: GenerateRequest) -> None:
        self.queue = EventQueue()
        service.submit(asked, self.queue)

    def all(self) -> list[Event]:
        events: list[Event] = []
        while not events or not isinstance(events[-1], Done | Failed):
            events += self.queue.get(300)
        return events


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_grammar_bomb_is_refused_with_its_reason(service: ChatService, bomb: str) -> None:
    given, reason = BOMBS[bomb]
    with pytest.raises(BadRequest, match=reason) as caught:
        service.submit(request(**given), EventQueue())
    assert caught.value.param
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize("calls", [None, PARSERS["hermes"].grammar])
@pytest.mark.parametrize("bomb", TOOL_BOMBS)
def test_a_grammar_bomb_in_a_strict_tool_is_refused(
    compiler: GrammarCompiler, bomb: str, calls: CallGrammar | None
) -> None:
    parameters, reason = TOOL_BOMBS[bomb]
    with pytest.raises(BadRequest, match=reason):
        compiler.structure(request(**strict_tool(parameters)), calls)


def test_a_regex_of_100000_choices_exceeds_the_grammar_limit() -> None:
    choices = "|".join(f"choice {i}" for i in range(100_000))
    params = {"grammar": {"type": "regex", "value": choices}}
    call = Call(
        {"model": "demo", "messages": MESSAGES, "optional_params": params, "logging_obj": None}
    )
    (asked,) = generate_requests(call)
    assert asked.grammar is not None
    assert len(asked.grammar["value"]) > grammar_trial.MAX_GRAMMAR


def test_other_requests_finish_while_grammar_bombs_are_tried(service: ChatService) -> None:
    other = Reader(service, request(max_tokens=200, min_tokens=200))

    def submit(given: dict[str, Any]) -> None:
        with pytest.raises(BadRequest, match="takes more than 1 s") as caught:
            service.submit(request(**given), EventQueue())
        assert caught.value.param

    with ThreadPoolExecutor(len(ENDLESS)) as pool:
        tried = pool.map(submit, ENDLESS)
        assert isinstance(other.all()[-1], Done)
        assert [*tried] == [None, None]


def test_a_grammar_that_fails_late_ends_only_its_request(service: ChatService) -> None:
    failing, other = Reader(service, request(**lark(LATE))), Reader(service, request())
    *before, last = failing.all()
    assert any(isinstance(event, Delta) for event in before)
    assert isinstance(last, Failed)
    assert (last.error.code, last.error.status, last.error.param) == (
        "grammar_failed",
        400,
        "grammar",
    )
    assert "Too many items" in last.error.message
    assert isinstance(other.all()[-1], Done)
    error = last.error.exception()
    assert isinstance(error, GrammarFailed)
    assert to_litellm(error, "m").status_code == 400  # which LiteLLM never sends again


def test_a_mask_that_is_too_late_fails_its_request(monkeypatch: Any, compiler: Any) -> None:
    monkeypatch.setattr("mlx_provider.chat.constraints.compiler.MASK_SECONDS", 0.01)
    structure = compiler.structure(request(**regex("a{5}")))

    class Stuck:
        def submit(self, _: Any) -> Future[bytes]:
            return Future()

    structure.constraint._pool = Stuck()
    structure.constraint.advance(compiler.fast.token_to_id("a"))
    with pytest.raises(GrammarFailed, match="gave up"):
        structure.constraint.mask()


def test_the_next_mask_is_computed_before_the_engine_needs_it(compiler: GrammarCompiler) -> None:
    structure = compiler.structure(request(**regex("a{5}")))
    assert structure is not None
    constraint = structure.constraint

    class Silent:
        def __getattr__(self, name: str) -> Any:
            assert name == "is_error"
            return lambda: False

    constraint._matcher = Silent()  # type: ignore[union-attr,assignment]
    assert constraint.mask().any()
    assert constraint.mask().any()


# -- the process that tries


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    eos = [tokenizer.token_to_id(end) for end in ENDS]
    return GrammarCompiler(tokenizer, eos, tokenizer.get_vocab_size())


@pytest.fixture
def trial() -> GrammarTrial:
    return GrammarTrial(1000, {"<|call|>": 900})


def test_special_tokens_in_a_grammar_are_found_by_name_and_number(trial: GrammarTrial) -> None:
    for known in ('start: <|call|> "a"', 'start: <[900]> "a"', 'start: <[500]> "a"'):
        assert trial.find_fault(known, Allowance()) == ""
    assert "unknown special token" in trial.find_fault("start: <|other|>", Allowance())


def test_a_grammar_process_killed_by_a_bomb_is_replaced(trial: GrammarTrial) -> None:
    idle = trial._processes.idle
    assert trial.find_fault('start: "a"', Allowance()) == ""
    (first,) = idle
    assert trial.find_fault('start: "b"', Allowance()) == ""
    assert idle == [first]
    assert "nested too deep" in trial.find_fault(chain(10_000), Allowance())
    assert idle == []
    assert first.process.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
    assert trial.find_fault('start: "a"', Allowance()) == ""


def test_a_grammar_process_that_cannot_start_is_no_bad_request(
    monkeypatch: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("raise SystemExit(3)")
    monkeypatch.setattr(grammar_trial, "CHILD", broken)
    with pytest.raises(RequestFailed, match="ended with 3"):
        GrammarTrial(1000, {}).find_fault('start: "a"', Allowance())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(RequestFailed, match="does not start"):
        GrammarTrial(1000, {}).find_fault('start: "a"', Allowance())


def test_all_grammars_of_one_request_share_one_time_limit(
    compiler: GrammarCompiler, monkeypatch: Any
) -> None:
    monkeypatch.setattr(grammar_trial, "SECONDS", 0.1)
    monkeypatch.setattr(
        "mlx_provider.chat.constraints.compiler.Allowance", partial(Allowance, 0.25)
    )
    slow = {"type": "integer", "multipleOf": 999_983}
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "parameters": {"properties": {"a": slow}}},
        }
        for i in range(100)
    ]
    with pytest.raises(BadRequest, match="take more than 4 s"):
        compiler.structure(request(tools=tools, tool_choice="required"))


# -- what is written for the compiler


TAGGED = PARSERS["qwen3_coder"].grammar
SELF = {
    "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}},
    "properties": {"p": {"$ref": "#/$defs/a"}},
}
DOUBLED = {
    "$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}
    | {"a40": {"enum": ["x"]}},
    "properties": {"p": {"$ref": "#/$defs/a0"}},
}
NUMBERS = {
    "$defs": {"n": {"type": "integer"}},
    "properties": {f"p{i}": {"$ref": "#/$defs/n"} for i in range(1500)},
    "required": [f"p{i}" for i in range(1500)],
}


@pytest.mark.parametrize("parameters", [SELF, DOUBLED])
def test_references_that_double_or_return_are_walked_once(
    compiler: GrammarCompiler, parameters: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = request(tools=[tool], tool_choice="required")
    assert compiler.structure(asked, TAGGED) is not None


def test_arguments_that_repeat_their_schema_are_bounded(compiler: GrammarCompiler) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": NUMBERS}}
    with pytest.raises(BadRequest, match="longer than 1000000 characters"):
        compiler.structure(request(tools=[tool], tool_choice="required"), TAGGED)


def test_a_deeply_nested_pattern_is_not_analysed() -> None:
    assert whole_text("(" * 100_000 + "a" + ")" * 100_000) is None
    assert whole_text("[" * 100_000) is None
