"""Every kind of grammar compiles, and is enforced, over five published vocabularies."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from byte_model import read
from mlx_provider import LoadOptions
from mlx_provider.chat.constraints.compiler import GrammarCompiler, Thoughts
from mlx_provider.chat.constraints.schema import INDENTED, ONE_LINE, Whitespace
from mlx_provider.chat.constraints.vocabulary import grammar_tokenizer
from mlx_provider.families.tokenizer.hf_tokenizer import HFTokenizer, load_tokenizer
from mlx_provider.testing.conformance.calls import PLAIN, SCHEMA, TOOL, ByteModel, Holds
from mlx_provider_tool_parsers import mlx_reasoning_parsers, mlx_tool_parsers

pytestmark = pytest.mark.real

NAMES = ("qwen3", "gemma3", "gptoss", "llama3_1", "deepseek_v3")
TOOL_PARSERS = {parser.name: parser for parser in mlx_tool_parsers()}
REASONING_PARSERS = {parser.name: parser for parser in mlx_reasoning_parsers()}
LONGEST = 64
"""Bytes of a token that are tried."""
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "word": {"enum": ["Grüße", "日本", "a b"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["x", "word", "tags"],
    "additionalProperties": False,
}
SAME = {"x": 7, "word": "日本", "tags": [True, False]}
SCHEMA_OF = {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}}
OBJECT = {"response_format": {"type": "json_object"}}
REGEX = {"grammar": {"type": "regex", "value": "[a-fé]{2,4}-日+"}}
LARK = {"grammar": {"type": "lark", "value": 'start: "yes" | /no{1,3}/'}}
CALL = {"tools": [TOOL], "tool_choice": "required"}
WHITE = re.compile(r"( |\n( {0,40}|\t{0,10})){1,2}")
"""Of a template that shows calls over several lines; an empty list has two places for it."""


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tokenizer_folder: Callable[[str], Path]) -> Any:
    return load_tokenizer(tokenizer_folder(request.param), LoadOptions())


def written_by(tokenizer: HFTokenizer, spaces: Whitespace) -> ByteModel:
    """A model of this vocabulary without sense; its matrix has a few rows more, as usual."""
    fast, eos = tokenizer.fast, frozenset([tokenizer.backend.eos_token_id])
    rows = len(tokenizer.backend) + 100
    return ByteModel(fast, eos, rows, GrammarCompiler(fast, eos, rows, spaces=spaces))


@pytest.fixture(scope="module")
def model(tokenizer: HFTokenizer) -> ByteModel:
    return written_by(tokenizer, ONE_LINE)


@pytest.fixture(scope="module")
def indented(tokenizer: HFTokenizer) -> ByteModel:
    return written_by(tokenizer, INDENTED)


@pytest.fixture(scope="module")
def spelled(tokenizer: HFTokenizer) -> dict[bytes, list[int]]:
    """Tokens by their bytes."""
    found: dict[bytes, list[int]] = {}
    vocabulary = grammar_tokenizer(tokenizer.fast, [tokenizer.backend.eos_token_id], 0)
    for token in range(len(tokenizer.backend)):
        found.setdefault(vocabulary.decode_bytes([token]), []).append(token)
    return found


def writable(
    model: ByteModel, constraint: Holds, text: str, spelled: dict[bytes, list[int]]
) -> bool:
    """Whether a text may be the reply, in whichever tokens: the longest that are allowed.

    Where a grammar leaves no choice of text, llguidance allows one way to cut it into tokens.
    """
    rest = text.encode()
    while rest:
        fit = (
            (end, token)
            for end in range(min(len(rest), LONGEST), 0, -1)
            for token in spelled.get(rest[:end], ())
            if model.allows(constraint, token)
        )
        end, token = next(fit, (0, None))
        if token is None:
            return False
        constraint.advance(token)
        rest = rest[end:]
    return any(model.allows(constraint, token) for token in model.eos)


def shown(value: Any, indent: int | str | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


HOLDS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "schema": (
        SCHEMA_OF,
        [shown(SAME), shown(SAME).replace(" ", "")],
        ['{"x": 100, "word": "a b", "tags": []}', '{"x": 7, "word": "a", "tags": []}', "{}"],
    ),
    "object": (OBJECT, ['{"any": [1, null, "é\\n"]}', "{}"], ["[1]", '{"any": }', "{'a': 1}"]),
    "regex": (REGEX, ["café-日", "fé-日日"], ["cafe", "f-日", "caf-日本"]),
    "lark": (LARK, ["yes", "nooo"], ["noooo", "Yes", "yes yes"]),
}


@pytest.mark.parametrize(("given", "fit", "fail"), HOLDS.values(), ids=HOLDS)
def test_each_kind_of_grammar_accepts_fitting_text_only(
    model: ByteModel, given: dict[str, Any], fit: list[str], fail: list[str]
) -> None:
    start = model.start(**given)
    for text in fit:
        assert model.accepts(start.fork(), text), text
    for text in fail:
        assert not model.accepts(start.fork(), text), text


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_a_forced_call_is_enforced_and_read_back(
    model: ByteModel, spelled: dict[bytes, list[int]], name: str
) -> None:
    parser = TOOL_PARSERS[name]
    grammar = parser.call_grammar()
    text = grammar.write("put", PLAIN, SCHEMA)
    if model.decode(model.encode(text)) != text:
        pytest.skip("this vocabulary cannot write the markers: its sign for a space stands in them")
    start = model.start(grammar, **CALL)
    assert writable(model, start.fork(), text, spelled)
    assert read(text, parser, [TOOL], REASONING_PARSERS.get(name)) == ([("put", PLAIN)], "")
    wrong = {**PLAIN, "count": "many"}
    assert not writable(model, start.fork(), grammar.write("put", wrong, SCHEMA), spelled)
    assert not writable(model, start.fork(), text.replace("put", "pat", 1), spelled)
    assert not writable(model, start.fork(), "I would rather talk.", spelled)


MOVE = {"type": "function", "function": {"name": "move", "parameters": POINT}}


@pytest.mark.parametrize("name", ["hermes", "harmony", "qwen3_coder", "glm47", "mistral"])
def test_the_parser_reads_the_call_of_a_random_model(model: ByteModel, name: str) -> None:
    parser = TOOL_PARSERS[name]
    given = {"tools": [MOVE], "tool_choice": "required", "parallel_tool_calls": False}
    start = model.start(parser.call_grammar(), **given)
    for seed in range(3):
        text, ended = model.sample(start.fork(), seed, 200)
        assert ended, text
        calls, beside = read(text, parser, [MOVE], REASONING_PARSERS.get(name))
        assert beside == ""
        ((called, arguments),) = calls
        assert called == "move"
        check_point(arguments)


def check_point(found: Any) -> None:
    assert set(found) == set(POINT["properties"])
    assert 0 <= found["x"] <= 99
    assert found["word"] in POINT["properties"]["word"]["enum"]
    assert len(found["tags"]) <= 3


def test_a_random_model_writes_json_that_fits_the_schema(model: ByteModel) -> None:
    start = model.start(**SCHEMA_OF)
    for seed in range(5):
        text, ended = model.sample(start.fork(), seed, 200)
        assert ended, text
        check_point(json.loads(text))


def test_json_on_one_line_has_one_space_at_most_after_a_separator(model: ByteModel) -> None:
    start = model.start(**SCHEMA_OF)
    for space in ("  ", "\t", "\n", "\n  ", "\r\n"):
        for place in (",", ":"):
            text = shown(SAME).replace(f"{place} ", place + space, 1)
            assert not model.accepts(start.fork(), text), text
    assert model.accepts(start.fork(), " " * 8 + shown(SAME))
    assert not model.accepts(start.fork(), " " * 9 + shown(SAME))


def test_indented_json_has_one_line_end_and_its_indentation(indented: ByteModel) -> None:
    start = indented.started(**SCHEMA_OF)
    for indent in (None, 0, 2, 4, "\t"):
        text = shown(SAME, indent)
        assert indented.accepts(start.fork(), text), text
        assert not indented.accepts(start.fork(), text.replace(": ", ":  ", 1))
        assert not indented.accepts(start.fork(), text.replace("{\n", "{\n\n", 1)) or not indent


def filled(model: ByteModel, constraint: Holds, spelled: dict[bytes, list[int]], seed: int) -> str:
    """A reply of a model that writes white space wherever it may."""
    dice, tokens = random.Random(seed), []
    white = {each for key, ids in spelled.items() if key.isspace() for each in ids}
    while not constraint.finished and len(tokens) < 1000:
        allowed = model.allowed_tokens(constraint)
        if model.eos & set(allowed):
            break
        token = dice.choice([each for each in allowed if each in white] or allowed)
        constraint.advance(token)
        tokens.append(token)
    return model.decode(tokens)


@pytest.mark.parametrize("lines", [False, True])
def test_a_model_that_prefers_white_space_still_completes_its_json(
    model: ByteModel, indented: ByteModel, spelled: dict[bytes, list[int]], lines: bool
) -> None:
    writer = indented if lines else model
    start = writer.started(**SCHEMA_OF)
    for seed in range(3):
        text = filled(writer, start.fork(), spelled, seed)
        check_point(json.loads(text))
        bare = text.lstrip()
        assert len(text) - len(bare) <= 8
        outside = re.sub(r'"[^"]*"', "", bare)
        for run in re.findall(r"\s+", outside):
            assert WHITE.fullmatch(run) if lines else run == " ", repr(run)


def test_a_grammar_constrains_only_the_text_after_the_thoughts(model: ByteModel) -> None:
    request = model.request(**SCHEMA_OF)
    thoughts = Thoughts("<think>", ("</think>",), opened=True)
    structure = model.compiler.structure(request, thoughts=thoughts)
    assert structure is not None
    text = f"Two {{ braces.\n</think>\n\n{shown(SAME)}"
    assert model.accepts(structure.constraint.fork(), text)
    assert not model.accepts(structure.constraint.fork(), text.replace("7", "700"))


def test_grammars_apply_to_final_harmony_messages(tokenizer_folder: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(tokenizer_folder("gptoss"), LoadOptions())
    assert isinstance(tokenizer, HFTokenizer)
    model = written_by(tokenizer, ONE_LINE)
    harmony = REASONING_PARSERS["harmony"].grammar
    structure = model.compiler.structure(model.request(**SCHEMA_OF), messages=harmony)
    assert structure is not None
    answer = f"{harmony.answer}{shown(SAME)}"
    thought = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{answer}"
    for text in (answer, thought):
        assert model.accepts(structure.constraint.fork(), text)
        assert not model.accepts(structure.constraint.fork(), text.replace("7", "700"))


def test_tokens_are_what_llguidance_reads_from_json(tokenizer: HFTokenizer) -> None:
    fast, eos = tokenizer.fast, tokenizer.backend.eos_token_id
    ours = grammar_tokenizer(fast, [eos], 0)
    theirs = LLTokenizer(fast.to_str(), n_vocab=ours.vocab_size, eos_token=[eos])
    for token in range(ours.vocab_size):
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token])
        assert ours.is_special_token(token) == theirs.is_special_token(token)
    for text in ("Hello  wörld 日本 <think> {}\n\n", " x", "a▁b"):
        assert ours.tokenize_str(text) == theirs.tokenize_str(text)
