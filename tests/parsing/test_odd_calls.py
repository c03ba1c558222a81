"""What models write beside the book: malformed calls, empty lists, spelt-out ends of turns."""

import json
import time
from typing import Any

import pytest

from mlx_provider.chat.output.reply import Reply
from mlx_provider.protocol.event_queue import join_deltas
from mlx_provider_tool_parsers.auto import TURN_ENDS
from mlx_provider_tool_parsers.pythonic import parse_call

from .conftest import REASONING_PARSERS, TOOL_PARSERS, WholeReply, read_chunks, tool, written

PARSERS = {parser.name: parser for parser in TOOL_PARSERS.values()}
MARKED = {name: parser for name, parser in PARSERS.items() if parser.whole is None}
JSON_FORMATS = (
    *("hermes", "qwen", "longcat", "jamba", "granite", "internlm", "gigachat3"),
    *("phi4_mini_json", "llama3_json", "xlam", "nemotron_json", "mistral", "apertus", "kimi_k2"),
    *("deepseek_v3", "deepseek_v31", "auto"),
)
TOOLS = [tool("f", a="string")]
F_IDS = "functions.f:0 f:0 functions.f f functions:f:0 default_api.f:3 f_0 f:abc".split()
NO_NAMES = ("call_f8a2b", "chatcmpl-tool-4f1c", "0", "functions.0", "toolu_01AbC", "")
MUSE_CALL = written(PARSERS["muse"], "f", {"a": "v"}) + "<|eom|><|start|>assistant to=user"
GIGACHAT = 'function call<|role_sep|>\n{"name": "f", "arguments": {"a": "v"}}'


def both(text: str, name: str, tools: list[Any] | None = None) -> WholeReply:
    """At once and by characters, which must agree."""
    found = read_chunks([text], tool_parser=PARSERS[name], tools=tools or [])
    assert read_chunks(list(text), tool_parser=PARSERS[name], tools=tools or []) == found
    return found


# ---- malformed calls


@pytest.mark.parametrize("name", JSON_FORMATS)
@pytest.mark.parametrize(
    ("old", "new"),
    [('": "v"', '": v"'), ('"v"', '"v" "w"'), ('{"a"', "{a"), ('"v"', '"v", oops'), ('":', '"')],
)
def test_a_malformed_call_becomes_text(name: str, old: str, new: str) -> None:
    text = written(PARSERS[name], "f", {"a": "v"})
    at = text.rindex(old)
    text = f"{text[:at]}{new}{text[at + len(old) :]} tail"
    found = both(text, name, TOOLS)
    assert (found.whole_calls, found.content, found.finish_reason) == ([], text, "stop")


@pytest.mark.parametrize("end", ["", "\\"])
def test_a_string_without_an_end_costs_linear_time(end: str) -> None:
    begun = time.thread_time()
    with pytest.raises(ValueError, match="not Python"):
        parse_call("f(a='" + "\\'" * 50_000 + end)
    assert time.thread_time() - begun < 5
    assert parse_call("f() # it's").name == "f"


@pytest.mark.parametrize("arguments", ['{"a": "x"}', r'"{\"a\": \"x\"}"', "null", None])
@pytest.mark.parametrize("call_first", [True, False])
def test_an_id_may_follow_the_arguments(arguments: str | None, call_first: bool) -> None:
    given = [] if arguments is None else [f'"arguments": {arguments}']
    parts = ['"name": "f"', *given, '"id": "abc123456"']
    text = f"[TOOL_CALLS][{{{', '.join(parts if call_first else parts[::-1])}}}]"
    wanted = '{"a": "x"}' if arguments and "x" in arguments else "{}"
    for chunks in ([text], list(text)):
        reply = Reply(tool_parser=PARSERS["mistral"])
        deltas = [delta for chunk in chunks for delta in reply.push_text(chunk)]
        (call,) = join_deltas(deltas).tool_calls
        assert (call.name, call.arguments, call.id) == ("f", wanted, "abc123456")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", r'<tool_call>{"name": "f\ud800", "arguments": {"a": 1}}</tool_call>'),
        ("mistral", r'[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "\ud800"}]'),
        ("apertus", r'<|tools_prefix|>[{"f\ud800": {}}]<|tools_suffix|>'),
        ("minicpm5", f'<function name="f">{{"x": {"1" * 5000}}}</function>'),
    ],
)
def test_a_call_with_half_a_surrogate_pair_or_a_number_that_python_refuses_is_text(
    name: str, text: str
) -> None:
    found = both(text, name)
    assert (found.calls, found.content, found.faults) == ((), text, ())


@pytest.mark.parametrize(
    "arguments", [r'"{\"a\": NaN}"', f'"{"[" * 100_000}"', "1" * 5000, r'"{\"a\": \"\ud800\"}"']
)
def test_strange_arguments_are_valid_json_and_no_fault_of_the_parser(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    found = both(text, "hermes")
    wanted = arguments if "ud800" not in arguments else r'{"a": "\ud800"}'
    assert (found.calls, found.faults) == ((("f", wanted),), ())


def test_a_malformed_call_after_a_good_one_becomes_text() -> None:
    good = '{"name": "f", "parameters": {"a": "x"}}'
    found = both(f'{good}; {{"name": "f", "parameters": {{"a": }}}} tail', "llama3_json")
    assert found.whole_calls == [("f", {"a": "x"})]
    assert found.content == '; {"name": "f", "parameters": {"a": }} tail'


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "gemma4", "minimax_m2"])
def test_a_good_call_after_a_malformed_one_is_read(name: str) -> None:
    good = written(PARSERS[name], "f", {"a": "v"})
    bad = good.replace('"v"', "}v{").replace("v<", "}v{<", 1) if '"v"' in good else "<x>"
    found = both(f"{bad} then {good}", name, TOOLS)
    assert found.whole_calls == [("f", {"a": "v"})]
    assert found.content.startswith(bad)


def test_a_json_answer_is_streamed_before_it_is_complete() -> None:
    text = '{"city": "Paris", "days": [' + "1, " * 50
    reply = read_chunks([text], tool_parser=PARSERS["llama3_json"])
    assert reply.content == text


# ---- JSON between the markers of a format of tags


@pytest.mark.parametrize(
    "name",
    [
        *("dots", "minimax_m2", "deepseek_v32", "deepseek_v4", "muse", "seed_oss", "nemotron"),
        *("qwen3_coder", "glm47", "poolside_v1", "hy_v3"),
    ],
)
def test_json_calls_inside_the_block_of_a_tagged_format_are_read(name: str) -> None:
    parser = PARSERS[name]
    call = {"name": "f", "arguments": {"a": "</x> {"}}
    bodies = [json.dumps(call), f"\n{json.dumps(call)}\n", json.dumps([call, call])]
    for body in bodies:
        found = both(f"So {parser.start}{body}{parser.end} end", name, TOOLS)
        assert found.whole_calls == [("f", {"a": "</x> {"})] * (2 if body[0] == "[" else 1)
        assert found.content.split() == ["So", "end"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm47", '<tool_call>f\n{"a": "v"}\n</tool_call>'),
        ("hy_v3", '<tool_calls><tool_call>f<tool_sep>{"a": "v"}</tool_call></tool_calls>'),
        ("minicpm5", '<function name="f">{"a": "v"}</function>'),
        ("minicpm5", "<function name=f><param name=a> v\n</param></function>"),
        ("dots", '<dots_function_call><invoke>{"name": "f", "arguments": {"a": "v"}}</invoke>'),
        ("dots", '<dots_function_call><invoke name="f">{"a": "v"}</invoke></dots_function_call>'),
        ("hermes", '<tool_call>{"args": {"a": "v"}, "name": "f", "arguments": {}}</tool_call>'),
        ("xlam", '```json\n[{"name": "f", "arguments": {"a": "v"}}]\n```'),
    ],
)
def test_a_tagged_call_with_arguments_as_one_json_object_is_read(name: str, text: str) -> None:
    found = both(text, name, TOOLS)
    assert (found.whole_calls, found.content) == ([("f", {"a": "v"})], "")


# ---- ends of turns


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_an_end_of_turn_marker_after_a_call_is_removed(name: str) -> None:
    call = written(PARSERS[name], "f", {"a": "v"})
    for end in TURN_ENDS:
        if PARSERS[name].whole is not None and end not in PARSERS[name].markers:
            continue
        for text in (call + end, f"{call}\n{end}\n\n"):
            found = read_chunks([text], tool_parser=PARSERS[name], tools=TOOLS)
            assert found.whole_calls == [("f", {"a": "v"})]
            assert found.content.strip() == ""


def test_an_end_of_turn_elsewhere_is_text() -> None:
    call = written(PARSERS["hermes"], "f", {"a": "v"})
    for text in ("It ends with <|im_end|>", f"<|im_end|>{call}", f"{call} is <|im_end|>"):
        assert "<|im_end|>" in both(text, "hermes").content


def test_an_end_of_turn_that_begins_the_next_call() -> None:
    found = both(f"<|message_sep|>\n\n{GIGACHAT}" * 2 + "<|message_sep|>\n\n", "gigachat3", TOOLS)
    assert found.whole_calls == [("f", {"a": "v"})] * 2
    assert found.content == ""


# ---- empty lists of calls


@pytest.mark.parametrize("name", sorted(set(MARKED) - {"minicpm5"}))
def test_a_marked_empty_list_of_calls_is_removed(name: str) -> None:
    parser = MARKED[name]
    marker = parser.start.rstrip("[")
    nothing = ["", "\n"] if parser.end and marker == parser.start else []
    for text in ["[]", "[ ]", *nothing]:
        found = both(f"So{marker}{text}{parser.end}", name)
        assert (found.calls, found.content, found.finish_reason) == ((), "So", "stop")


@pytest.mark.parametrize("name", sorted(MARKED))
def test_an_empty_list_without_a_marker_or_its_bracket_is_an_answer(name: str) -> None:
    unclosed = f"{MARKED[name].start.rstrip('[')}[{MARKED[name].end}"
    for text in ("[]", "[ ]", "The list is [].", "```json\n[]\n```", "{}", f"{unclosed} x"):
        assert both(text, name).content == text


# ---- replies that begin in a header


MUSE = "<|message|>so<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>"
HARMONY = "<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Hi"


@pytest.mark.parametrize(
    ("name", "text", "reasoning"),
    [
        *(("muse", f"{s}assistant to=self{MUSE}", "so") for s in ("<|start|>", "")),
        *(("muse", f"{start}self{MUSE}", "so") for start in (" to=", "to=", "=", "")),
        *(("muse", f"{s}<|message|>Hi<|eot|>", "") for s in ("assistant to=user", "user", "")),
        *(("harmony", f"{start}analysis{HARMONY}", "so") for start in ("", "assistant<|channel|>")),
    ],
)
def test_a_reply_begins_in_a_header(name: str, text: str, reasoning: str) -> None:
    for chunks in ([text], list(text)):
        found = read_chunks(chunks, reasoning_parser=REASONING_PARSERS[name])
        assert (found.reasoning, found.content) == (reasoning, "Hi")


@pytest.mark.parametrize("text", ["self", "user said so", "assistant to=user", "to=self: no"])
def test_muse_header_words_in_plain_text_stay_text(text: str) -> None:
    for chunks in ([text], list(text)):
        assert read_chunks(chunks, reasoning_parser=REASONING_PARSERS["muse"]).content == text


HARMONY_CALLS = (
    " to=functions.f<|channel|>commentary json",
    "assistant to=functions.f<|channel|>commentary",
    "commentary to=functions.f <|constrain|>json",
)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        *(("harmony", f'{begun}<|message|>{{"a": "v"}}<|call|>', "") for begun in HARMONY_CALLS),
        ("muse", f" to=functions.f-1<|message|>{MUSE_CALL}<|message|>Hi<|eot|>", "Hi"),
        ("gigachat3", GIGACHAT, ""),
        *(("gigachat3", f"So<|message_sep|>{end}{GIGACHAT}", "So") for end in ("", "\n")),
    ],
)
def test_a_reply_begins_in_the_header_of_a_call(name: str, text: str, content: str) -> None:
    found = both(text, name, TOOLS)
    assert (found.whole_calls, found.content) == ([("f", {"a": "v"})], content)


@pytest.mark.parametrize(
    "header",
    ["assistant", "assistant to", "assistant to=functions.wri", "assistant to=functions.f "],
)
def test_a_cut_harmony_header_is_not_content(header: str) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>"
    formats = {
        "tool_parser": TOOL_PARSERS["harmony"],
        "reasoning_parser": REASONING_PARSERS["harmony"],
    }
    for chunks in ([thought + header], [thought, *header]):
        found = read_chunks(chunks, **formats)
        assert (found.reasoning, found.content, found.calls) == ("Hm.", "", ())
    _, recipient, name = header.partition(" to=")
    if recipient:
        assert both(recipient + name, "harmony").content == ""


def test_harmony_header_words_in_plain_text_stay_text() -> None:
    for text in ("final answer", "analysis of it", "assistant", "commentary to=you is"):
        assert both(text, "harmony").content == text


# ---- ids in place of names


def kimi_call(written_id: str) -> str:
    return (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{written_id}"
        '<|tool_call_argument_begin|>{"a": "v"}<|tool_call_end|><|tool_calls_section_end|>'
    )


@pytest.mark.parametrize(
    ("written_id", "name"),
    [
        *((written_id, "f") for written_id in F_IDS),
        *((f"functions.{name}:0", name) for name in ("call_user", "add", "cafe")),
    ],
)
def test_a_kimi_call_is_read_with_every_spelling_of_its_id(written_id: str, name: str) -> None:
    found = both(kimi_call(written_id), "kimi_k2", [tool(name, a="string"), tool("g", b="string")])
    assert (found.whole_calls, found.content) == ([(name, {"a": "v"})], "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("kimi_k2", kimi_call(written_id)) for written_id in NO_NAMES),
        ("apertus", '<|tools_prefix|>[{"": {}}]<|tools_suffix|>'),
        ("hermes", '[Calling tool:({"a": "v"})]'),
        ("xlam", "```\nprint(1)\n```"),
    ],
)
def test_a_call_without_a_name_is_text(name: str, text: str) -> None:
    found = both(text, name, TOOLS)
    assert (found.calls, found.content) == ((), text)
