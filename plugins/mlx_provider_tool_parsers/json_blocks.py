"""JSON calls between markers: Hermes, Qwen and many more.

Some servers write calls of earlier turns as `[Calling tool: NAME({...})]`, and models imitate them.
Apertus writes a list of objects in which the tool's name is the key of its arguments."""

import json

from mlx_provider import CallGrammar, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, claim, show_through

from .json_text import JsonBlock, identity, json_block, read_call, read_json_text
from .tagged import TagFormat
from .values import accept_spaced, behind

CALLING = "[Calling tool:"
PREFIX, SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"  # of Apertus
TAGGED_JSON = JsonBlock(openers=("<tool_call>",), end="</tool_call>")
BARE_JSON = JsonBlock(openers=("{",))
LLAMA_JSON = JsonBlock(openers=("<|python_tag|>", "{", "[{"))
FUNCTION_TAGS = TagFormat(untyped_values="json")
FUNCTION_JSON = TagFormat(blocks=(), block_end="")
TAGGED_GRAMMAR = CallGrammar.json("<tool_call>\n", "\n</tool_call>")
GIGACHAT_ENDS = ("<|message_sep|>\n\n", "<|message_sep|>\n", "<|message_sep|>", "")
"""Texts before `function call`. They may stand in the prompt, and models may omit line ends."""


def scan_calling(reader: TextReader) -> Reading[None]:
    """Read `[Calling tool: NAME({...})]`. Raises `NotACall`."""
    yield from reader.expect(CALLING)
    name = (yield from reader.until("(", "]")).strip()
    yield from reader.expect("(")
    yield from read_call(reader, name)
    yield from reader.space()
    yield from reader.accept(")")
    yield from reader.accept("]")


def scan_qwen(reader: TextReader, tools: Tools) -> Reading[None]:
    """JSON in `<tool_call>`, or `[Calling tool:`. `<tool_call><function=` is another format: a
    complete block of it is text, and a block that the end of the reply cuts is dropped."""
    if (yield from reader.at(CALLING)):
        yield from scan_calling(reader)
        return
    if (yield from behind(reader, "<tool_call>", "<function=")):
        yield from reader.until("</tool_call>")
        raise NotACall("another format", whole=True)
    yield from TAGGED_JSON.scan(reader, tools)


def scan_llama(reader: TextReader, tools: Tools) -> Reading[None]:
    """Bare JSON, with or without a tag before it, or `<function=NAME>{...}</function>`."""
    is_tag = yield from reader.at("<function=")
    yield from (FUNCTION_JSON if is_tag else LLAMA_JSON).scan(reader, tools)


def scan_hermes(reader: TextReader, tools: Tools) -> Reading[None]:
    """JSON or a tag `<function=`, each bare or in `<tool_call>`; or `[Calling tool:`."""
    found = yield from reader.at(CALLING, "<tool_call>", "<function=", "{")
    if found == CALLING:
        yield from scan_calling(reader)
    elif found == "{":
        yield from BARE_JSON.scan(reader, tools)
    elif found == "<function=" or (yield from behind(reader, "<tool_call>", "<function=")):
        yield from FUNCTION_TAGS.scan(reader, tools)
    else:
        yield from TAGGED_JSON.scan(reader, tools)


def scan_apertus(reader: TextReader, tools: Tools) -> Reading[None]:
    """`<|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>`."""
    yield from reader.expect(PREFIX)
    yield from reader.space()
    yield from reader.expect("[")
    calls_before = reader.calls_begun
    while True:
        yield from reader.space()
        yield from reader.accept(",")
        yield from reader.space()
        if (yield from reader.accept("]")):
            break
        yield from claim(_read_named_arguments(reader), show_through(SUFFIX))
    if reader.calls_begun == calls_before:
        raise NotACall("an empty list")
    yield from accept_spaced(reader, SUFFIX)


def _read_named_arguments(reader: TextReader) -> Reading[None]:
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.at('"')) != '"':
        raise NotACall("a call is a name and its arguments")
    name = json.loads((yield from read_json_text(reader)))
    yield from reader.space()
    yield from reader.expect(":")
    yield from read_call(reader, name)
    yield from reader.space()
    yield from reader.expect("}")


PARSERS = (
    ToolParser(
        start="<tool_call>",
        starts=("<function=", CALLING),
        first=("{",),
        end="</tool_call>",
        scan=scan_hermes,
        grammar=TAGGED_GRAMMAR,
        fallback="write",
        **identity(
            "hermes",
            ("<tool_call>", "name"),
            aliases="nous json_tools ernie45 ernie granite4",
            rank=1,
        ),
    ),
    ToolParser(
        start="<tool_call>",
        starts=(CALLING,),
        end="</tool_call>",
        scan=scan_qwen,
        cut="drop",
        grammar=TAGGED_GRAMMAR,
        **identity("qwen", aliases="qwen3 qwen2_5", rank=0),
    ),
    json_block(
        ("<longcat_tool_call>",),
        "</longcat_tool_call>",
        grammar=CallGrammar.json("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        **identity("longcat", ("<longcat_tool_call>",)),
    ),
    json_block(
        ("<tool_calls>",),
        "</tool_calls>",
        detect=lambda template: "<tool_calls>[" in template or "<tool_calls>\\n" in template,
        grammar=CallGrammar.json_list("<tool_calls>", "</tool_calls>"),
        **identity("jamba", aliases="hunyuan_a13b hunyuan minimax_m1"),
    ),
    json_block(
        ("<|tool_call|>", "<tool_call>"),
        "",
        first=("[",),
        grammar=CallGrammar.json_list("<|tool_call|>", ""),
        **identity("granite", ("<|tool_call|>",), aliases="granite3"),
    ),
    json_block(
        ("<|action_start|><|plugin|>",),
        "<|action_end|>",
        grammar=CallGrammar.json("<|action_start|><|plugin|>", "<|action_end|>", key="parameters"),
        **identity("internlm", ("<|action_start|>",), aliases="internlm2 interns1"),
    ),
    json_block(
        ("functools[", "<|tool_call|>["),
        "<|/tool_call|>",
        detect=lambda template: "functools[" in template or "<|/tool_call|>" in template,
        grammar=CallGrammar.json_list("functools", ""),
        **identity("phi4_mini_json", aliases="phi4 phi4_mini", rank=3),
    ),
    json_block(
        ("<|function_call|>", *(f"{end}function call<|role_sep|>" for end in GIGACHAT_ENDS)),
        "",
        markers=("<|message_sep|>", "<|role_sep|>"),
        grammar=CallGrammar.json("<|function_call|>", ""),
        **identity("gigachat3", ("function call<|role_sep|>",), aliases="gigachat"),
    ),
    ToolParser(
        start="<|python_tag|>",
        starts=("{", "<function="),
        first=("[{",),
        end="",
        scan=scan_llama,
        detect=lambda text: "<|python_tag|>" in text or '"parameters": dictionary of' in text,
        grammar=CallGrammar.json("", "", key="parameters"),
        **identity("llama3_json", aliases="llama llama3 llama3_1 llama3_2 llama4_json"),
    ),
    json_block(
        ("[TOOL_CALLS]", "<tool_call>", "[", "```json"),
        "</tool_call>",
        fence="```",
        detect=lambda template: "xlam" in template.lower(),
        grammar=CallGrammar.json_list("", ""),
        **identity("xlam"),
    ),
    json_block(
        ("<TOOLCALL>",),
        "</TOOLCALL>",
        grammar=CallGrammar.json_list("<TOOLCALL>", "</TOOLCALL>"),
        **identity("nemotron_json", ("<TOOLCALL>",), rank=3),
    ),
    ToolParser(
        start=PREFIX,
        end=SUFFIX,
        scan=scan_apertus,
        grammar=CallGrammar(
            open=f"{PREFIX}[", before='{"{name}": ', after="}", close=f"]{SUFFIX}", between=", "
        ),
        **identity("apertus", (PREFIX,), aliases="apertus2509", rank=3),
    ),
)
