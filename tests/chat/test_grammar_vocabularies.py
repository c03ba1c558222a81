"""Grammars over the vocabularies that real models have, and when those are built."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from byte_model import MARKERS, byte_model, byte_tokenizer
from mlx_provider.chat.constraints import compiler as compiling
from mlx_provider.chat.constraints.compiler import GrammarCompiler
from mlx_provider.chat.constraints.vocabulary import grammar_tokenizer
from mlx_provider.errors import BadRequest
from mlx_provider.records import CallGrammar
from mlx_provider.testing.conformance.calls import ByteModel
from mlx_provider_tool_parsers import mlx_tool_parsers

UNUSED = [f"<unused{i}>" for i in range(300)]
VOCABULARIES = {
    "a few": ["<|im_start|>", "<repo>", "<file>"],
    "markers among them": ["<s>", *MARKERS],
    "every id below 256": UNUSED,
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
CALLS = CallGrammar.json("<tool_call>\n", "\n</tool_call>")
TOOL = {"type": "function", "function": {"name": "move", "parameters": POINT}}


@pytest.fixture(scope="module", params=VOCABULARIES.values(), ids=VOCABULARIES)
def low(request: pytest.FixtureRequest) -> ByteModel:
    return byte_model(request.param)


def test_the_first_ids_are_special_tokens(low: ByteModel) -> None:
    assert low.tokenizer.get_added_tokens_decoder()[0].special


@pytest.mark.parametrize(
    ("given", "fits", "fails"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}},
            '{"x": 7}',
            '{"x": 100}',
        ),
        ({"response_format": {"type": "json_object"}}, '{"any": [1, null]}', "[1]"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": POINT}}},
            '{"x": 7}',
            '{"x": 100}',
        ),
        ({"grammar": {"type": "regex", "value": "[a-f]{2,4}"}}, "cafe", "cage"),
        ({"grammar": {"type": "lark", "value": 'start: "yes" | "no"'}}, "no", "maybe"),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            '<tool_call>\n{"name": "move", "arguments": {"x": 3}}\n</tool_call>',
            '{"x": 3}',
        ),
    ],
    ids=["schema", "object", "object of a schema", "regex", "lark", "call"],
)
def test_a_grammar_accepts_only_fitting_text_in_each_vocabulary(
    low: ByteModel, given: dict[str, Any], fits: str, fails: str
) -> None:
    start = low.start(CALLS, **given)
    assert low.accepts(start.fork(), fits)
    assert not low.accepts(start.fork(), fails)


def test_a_random_model_writes_json_that_fits_the_schema(low: ByteModel) -> None:
    given = {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}}
    start = low.start(**given)
    for seed in range(5):
        text, ended = low.sample(start.fork(), seed, 200)
        assert ended
        assert 0 <= json.loads(text)["x"] <= 99


def test_an_added_token_of_white_space_is_text() -> None:
    """Gemma 3 has line ends among its added tokens."""
    model = byte_model()
    model.tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    model.compiler = compiler_of(model)
    (parser,) = (each for each in mlx_tool_parsers() if each.name == "qwen3_coder")
    grammar, schema = parser.call_grammar(), {"properties": {"text": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "put", "parameters": schema}}
    text = grammar.write("put", {"text": "two\nlines\n\nand more"}, schema)
    start = model.start(grammar, tools=[tool], tool_choice="required")
    assert model.accepts(start, text)


def sentencepiece() -> Tokenizer:
    """Pieces and bytes as Gemma has them, with runs of spaces among the added tokens."""
    pieces = ["<eos>", "<pad>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "é", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.add_special_tokens(["<eos>", "<pad>"])
    added = ["▁▁", "\n\n", "<unused0>", "[multi]", "<b"]
    made.add_tokens([AddedToken(each, normalized=False) for each in added])
    return made


def cut_short() -> Tokenizer:
    made = byte_tokenizer()
    made.enable_truncation(4)
    made.enable_padding()
    return made


@pytest.mark.parametrize("make", [byte_tokenizer, sentencepiece])
def test_tokens_are_what_llguidance_reads_from_json(make: Any) -> None:
    fast = make()
    ours = grammar_tokenizer(fast, [0], 700)
    theirs = LLTokenizer(fast.to_str(), n_vocab=700, eos_token=[0])
    assert (ours.vocab_size, ours.eos_token) == (theirs.vocab_size, theirs.eos_token)
    for token in range(fast.get_vocab_size(with_added_tokens=True)):
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token])
        assert ours.is_special_token(token) == (theirs.is_special_token(token) or token == 0)
    for text in (" a", "a  a", "é\n\n", "日", "[multi]"):
        assert ours.tokenize_str(text) == theirs.tokenize_str(text)


def test_truncation_settings_of_a_tokenizer_do_not_affect_grammars() -> None:
    fast = cut_short()
    found = grammar_tokenizer(fast, [fast.token_to_id("<|im_end|>")], 0)
    assert found.decode_bytes(found.tokenize_str("more than four")) == b"more than four"
    assert fast.truncation["max_length"] == 4


@pytest.mark.parametrize("end", ["[END]", "a"])
def test_every_end_token_is_a_special_token_of_the_grammar(end: str) -> None:
    """Also one that is no added token."""
    fast = byte_tokenizer()
    fast.add_tokens([AddedToken("[END]", special=False)])
    found = grammar_tokenizer(fast, [fast.token_to_id(end)], 0)
    assert found.is_special_token(fast.token_to_id(end))
    assert not grammar_tokenizer(fast, [], 0).is_special_token(fast.token_to_id(end))


def compiler_of(model: ByteModel) -> GrammarCompiler:
    return GrammarCompiler(model.tokenizer, model.eos, model.rows)


def test_concurrent_requests_wait_for_one_vocabulary_build(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, built = threading.Event(), threading.Event(), []

    def slow(*given: Any) -> Any:
        begun.set()
        assert go.wait(300)
        built.append(threading.current_thread().name)
        return grammar_tokenizer(*given)

    monkeypatch.setattr(compiling, "grammar_tokenizer", slow)
    model = byte_model()
    compiler = compiler_of(model)
    request = model.request(response_format={"type": "json_object"})
    compiler.prepare()
    assert begun.wait(300)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(compiler.structure, request) for _ in range(3)]
        go.set()
        assert all(each.result(300) is not None for each in asked)
    assert built == ["grammar vocabulary"]


def test_a_failed_vocabulary_build_refuses_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Any:
        raise ValueError("no such decoder")

    monkeypatch.setattr(compiling, "grammar_tokenizer", refused)
    model = byte_model()
    compiler = compiler_of(model)
    compiler.prepare()
    with pytest.raises(BadRequest, match=r"cannot be constrained.*no such decoder"):
        compiler.structure(model.request(response_format={"type": "json_object"}))
