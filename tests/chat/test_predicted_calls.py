"""Calls that no grammar demands are predicted from their marker on."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from byte_model import ENDS, byte_tokenizer
from mlx_provider.chat.constraints.call_text import MAX_REPLAY, CallMatchers, CallPredictor
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records import CallGrammar, TaggedArguments, ToolParser

PARSER = ToolParser(
    "tagged", "<tool_call>", "</tool_call>", grammar=CallGrammar.json("<tool_call>", "</tool_call>")
)
TOKENIZER = byte_tokenizer()
EOS = [TOKENIZER.token_to_id(end) for end in ENDS]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool("get_weather", kind={"enum": ["now", "tomorrow"]}, hot={"type": "boolean"}),
    tool("read_file", path={"type": "string"}),
]
SPACED = '<tool_call>{"name": "get_weather", "arguments": {"kind": "now", "hot": true}}</tool_call>'
COMPACT = SPACED.replace(": ", ":").replace(", ", ",")


class Later(Executor):
    """Runs what it is given when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: function(*args, **more)))
        return future

    def run(self) -> None:
        for future, function in self.waiting:
            future.set_result(function())
        self.waiting.clear()


def matchers(background: Executor | None = None, **asked: Any) -> CallMatchers:
    compiler = GrammarCompiler(TOKENIZER, EOS, 384, background=background)
    return CallMatchers(compiler, GenerateRequest(model="m", tools=TOOLS, **asked), PARSER)


def test_tenants_share_no_grammars_of_predicted_calls() -> None:
    compiler = GrammarCompiler(TOKENIZER, EOS, 384)
    request = GenerateRequest(model="m", tools=TOOLS, salt="a", origin="remote")
    assert CallMatchers(compiler, request, PARSER).compile(0).result() is not None
    assert {namespace for namespace, _ in compiler.compiled} == {"remote:a"}


@pytest.fixture
def predictor() -> CallPredictor:
    return CallPredictor(matchers())


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


def predicted(predictor: CallPredictor, text: str) -> int:
    """Feed a text; how many of its tokens were predicted."""
    right = 0
    for token in ids(text):
        right += predictor.likely()[:1] == [token]
        predictor.advance(token)
    return right


def likely(predictor: CallPredictor) -> str:
    text: str = TOKENIZER.decode(list(predictor.likely()), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("text", [SPACED, COMPACT])
def test_most_of_a_call_is_predicted_with_or_without_spaces(
    predictor: CallPredictor, text: str
) -> None:
    predicted(predictor, "I look at it.\n")
    assert predicted(predictor, text) > 0.75 * len(ids(text))
    again = predicted(predictor, text)
    assert again >= predicted(predictor, text) > 0.75 * len(ids(text)), "the next call begins so"


def test_prediction_stops_in_an_invalid_call_and_resumes_in_the_next_one(
    predictor: CallPredictor,
) -> None:
    refused = '<tool_call>{"name": "get_weather", "arguments": {"kind": "late'
    assert predicted(predictor, refused) > 15
    assert predicted(predictor, '", "hot": true}}</tool_call>') == 0
    assert predicted(predictor, SPACED) > 30


def test_a_marker_in_text_predicts_nothing_and_a_second_call_does(predictor: CallPredictor) -> None:
    predicted(predictor, "A call begins with <tool_call> and a brace. ")
    assert likely(predictor) == ""
    predicted(predictor, f"{SPACED}\n<tool_call>")
    assert likely(predictor) == '{"name": "'
    predicted(predictor, '{"name": "r')
    assert likely(predictor) == 'ead_file", "arguments": {"path": "'


def test_a_marker_is_recognised_across_tokens_and_ignored_inside_a_value() -> None:
    parser = ToolParser("named", "Call:", "", grammar=CallGrammar('Call:{"{name}": ', "}"))
    compiler = GrammarCompiler(TOKENIZER, EOS, 384)
    asked = GenerateRequest(model="m", tools=TOOLS[1:])
    predictor = CallPredictor(CallMatchers(compiler, asked, parser))
    predicted(predictor, 'A Call, Call:{"')
    assert likely(predictor) == 'read_file": {"path": "'
    predicted(predictor, 'read_file": {"path": "a Call: b"')
    assert likely(predictor) == "}}"


def test_grammars_are_compiled_only_after_a_marker_and_in_the_background() -> None:
    later = Later()
    shared = matchers(later)
    one, other = CallPredictor(shared), CallPredictor(shared)
    predicted(one, "No call. " * 20)
    assert not later.waiting
    begun = '<tool_call>{"name": "g'
    for each in (one, other):
        assert predicted(each, begun) == 0
    assert len(later.waiting) == 1, "one grammar for all choices"
    later.run()
    assert predicted(one, "et_") == 2, "it catches up with its next token"
    assert likely(one) == 'weather", "arguments": {"kind": "'
    assert predicted(other, '","') == 0, "another spelling is compiled, too"
    assert len(later.waiting) == 1


@pytest.mark.parametrize(("length", "after"), [(10, "</>!"), (MAX_REPLAY, "")])
def test_a_long_call_is_not_replayed_in_another_spelling(length: int, after: str) -> None:
    tags = TaggedArguments("<", ">", "</>")
    parser = ToolParser("tags", "Call:", "", grammar=CallGrammar("Call:{name} ", "!", tagged=tags))
    tools = [tool("note", text={"type": "string"}, at={"type": "array"})]
    compiler = GrammarCompiler(TOKENIZER, EOS, 384)
    asked = GenerateRequest(model="m", tools=tools)
    predictor = CallPredictor(CallMatchers(compiler, asked, parser))
    predicted(predictor, f"Call:note <text>{'x' * length}</>")
    assert likely(predictor) == "<at>["
    predicted(predictor, "<at>[1,2]")
    assert likely(predictor) == after


def test_tools_that_cannot_be_enforced_are_not_predicted() -> None:
    strict = tool("count", number={"type": "integer", "multipleOf": 1e-300})
    strict["function"]["strict"] = True
    compiler = GrammarCompiler(TOKENIZER, EOS, 384)
    asked = GenerateRequest(model="m", tools=[strict])
    predictor = CallPredictor(CallMatchers(compiler, asked, PARSER))
    assert predicted(predictor, '<tool_call>{"name": "count"') == 0


def test_a_named_tool_is_predicted_from_its_first_letter() -> None:
    named = {"type": "function", "function": {"name": "read_file"}}
    predictor = CallPredictor(matchers(tool_choice=named))
    predicted(predictor, "<tool_call>")
    assert likely(predictor) == '{"name": "read_file", "arguments": {"path": "'
