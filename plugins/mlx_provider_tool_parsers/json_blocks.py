"""JSON calls between markers: Hermes, Qwen and many more; `[Calling tool: NAME({...})]`, the form
of calls in histories of some servers, which models imitate; and Apertus, a list of objects in which
the tool's name is the key of its arguments."""

import json

from mlx_provider import CallGrammar, ToolParser
from mlx_provider.records import NotACall, Reading, TextReader, Tools, claimed, through

from .json_text import JsonBlock, entry, json_block, read_call, read_whole
from .tagged import TagFormat
from .values import accept_spaced, behind

OPENER = "[Calling tool:"


def scan_calling(reader: TextReader) -> Reading[None]:
    yield from reader.expect(OPENER)
    name = (yield from reader.until("(", "]")).strip()
    yield from reader.expect("(")
    yield from read_call(reader, name)
    yield from reader.space()
    yield from reader.accept(")")
    yield from reader.accept("]")


_HERMES = JsonBlock(openers=("<tool_call>",), end="</tool_call>")
_BARE = JsonBlock(openers=("{",))
_TAGS = TagFormat(unknown="json")
_LLAMA = JsonBlock(openers=("<|python_tag|>", "{", "[{"))
_BEFORE_ROLE = ("<|message_sep|>\n\n", "<|message_sep|>\n", "<|message_sep|>", "")
"""The prompt may have begun the header, and models may omit its line ends."""
_NAMED = TagFormat(blocks=(), block_end="")
_IN_TAGS = CallGrammar.json("<tool_call>\n", "\n</tool_call>")


def scan_qwen(reader: TextReader, tools: Tools) -> Reading[None]:
    """A call in another format is dropped if the reply's end cuts it."""
    if (yield from reader.at(OPENER)):
        yield from scan_calling(reader)
        return
    if (yield from behind(reader, "<tool_call>", "<function=")):
        yield from reader.until("</tool_call>")
        raise NotACall("another format", whole=True)
    yield from _HERMES.scan(reader, tools)


def scan_llama(reader: TextReader, tools: Tools) -> Reading[None]:
    """Bare JSON, with or without a tag before it, or `<function=NAME>{...}</function>`."""
    if (yield from reader.at("<function=")):
        yield from _NAMED.scan(reader, tools)
    else:
        yield from _LLAMA.scan(reader, tools)


def scan_hermes(reader: TextReader, tools: Tools) -> Reading[None]:
    found = yield from reader.at(OPENER, "<tool_call>", "<function=", "{")
    if found == OPENER:
        yield from scan_calling(reader)
    elif found == "{":
        yield from _BARE.scan(reader, tools)
    elif found == "<function=" or (yield from behind(reader, "<tool_call>", "<function=")):
        yield from _TAGS.scan(reader, tools)
    else:
        yield from _HERMES.scan(reader, tools)


_PREFIX, _SUFFIX = "<|tools_prefix|>", "<|tools_suffix|>"


def scan_apertus(reader: TextReader, tools: Tools) -> Reading[None]:
    """`<|tools_prefix|>[{"NAME": {...}}, ...]<|tools_suffix|>`."""
    yield from reader.expect(_PREFIX)
    yield from reader.space()
    yield from reader.expect("[")
    before = reader.calls
    while True:
        yield from reader.space()
        yield from reader.accept(",")
        yield from reader.space()
        if (yield from reader.accept("]")):
            break
        yield from claimed(_named_call(reader), through(_SUFFIX))
    if reader.calls == before:
        raise NotACall("an empty list")
    yield from accept_spaced(reader, _SUFFIX)


def _named_call(reader: TextReader) -> Reading[None]:
    yield from reader.expect("{")
    yield from reader.space()
    if (yield from reader.at('"')) != '"':
        raise NotACall("a call is a name and its arguments")
    name = json.loads((yield from read_whole(reader)))
    yield from reader.space()
    yield from reader.expect(":")
    yield from read_call(reader, name)
    yield from reader.space()
    yield from reader.expect("}")


HERMES = ToolParser(
    start="<tool_call>",
    starts=("<function=", OPENER),
    first=("{",),
    end="</tool_call>",
    scan=scan_hermes,
    grammar=_IN_TAGS,
    fallback="write",
    **entry("hermes", ("<tool_call>", "name"), "nous json_tools ernie45 ernie granite4", 1),
)


PARSERS = (
    HERMES,
    ToolParser(
        start="<tool_call>",
        starts=(OPENER,),
        end="</tool_call>",
        scan=scan_qwen,
        cut="drop",
        grammar=_IN_TAGS,
        **entry("qwen", (), "qwen3 qwen2_5", 0),
    ),
    json_block(
        ("<longcat_tool_call>",),
        "</longcat_tool_call>",
        grammar=CallGrammar.json("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        **entry("longcat", ("<longcat_tool_call>",)),
    ),
    json_block(
        ("<tool_calls>",),
        "</tool_calls>",
        detect=lambda template: "<tool_calls>[" in template or "<tool_calls>\\n" in template,
        grammar=CallGrammar.json_list("<tool_calls>", "</tool_calls>"),
        **entry("jamba", aliases="hunyuan_a13b hunyuan minimax_m1"),
    ),
    json_block(
        ("<|tool_call|>", "<tool_call>"),
        "",
        first=("[",),
        grammar=CallGrammar.json_list("<|tool_call|>", ""),
        **entry("granite", ("<|tool_call|>",), "granite3"),
    ),
    json_block(
        ("<|action_start|><|plugin|>",),
        "<|action_end|>",
        grammar=CallGrammar.json("<|action_start|><|plugin|>", "<|action_end|>", key="parameters"),
        **entry("internlm", ("<|action_start|>",), "internlm2 interns1"),
    ),
    json_block(
        ("functools[", "<|tool_call|>["),
        "<|/tool_call|>",
        detect=lambda template: "functools[" in template or "<|/tool_call|>" in template,
        grammar=CallGrammar.json_list("functools", ""),
        **entry("phi4_mini_json", aliases="phi4 phi4_mini", rank=3),
    ),
    json_block(
        ("<|function_call|>", *(f"{before}function call<|role_sep|>" for before in _BEFORE_ROLE)),
        "",
        markers=("<|message_sep|>", "<|role_sep|>"),
        grammar=CallGrammar.json("<|function_call|>", ""),
        **entry("gigachat3", ("function call<|role_sep|>",), "gigachat"),
    ),
    ToolParser(
        start="<|python_tag|>",
        starts=("{", "<function="),
        first=("[{",),
        end="",
        scan=scan_llama,
        detect=lambda t: "<|python_tag|>" in t or '"parameters": dictionary of' in t,
        grammar=CallGrammar.json("", "", key="parameters"),
        **entry("llama3_json", aliases="llama llama3 llama3_1 llama3_2 llama4_json"),
    ),
    json_block(
        ("[TOOL_CALLS]", "<tool_call>", "[", "```json", "```\n"),
        "</tool_call>",
        fence="```",
        detect=lambda template: "xlam" in template.lower(),
        grammar=CallGrammar.json_list("", ""),
        **entry("xlam"),
    ),
    json_block(
        ("<TOOLCALL>",),
        "</TOOLCALL>",
        grammar=CallGrammar.json_list("<TOOLCALL>", "</TOOLCALL>"),
        **entry("nemotron_json", ("<TOOLCALL>",), rank=3),
    ),
    ToolParser(
        start=_PREFIX,
        end=_SUFFIX,
        scan=scan_apertus,
        grammar=CallGrammar('{"{name}": ', "}", f"{_PREFIX}[", f"]{_SUFFIX}", between=", "),
        **entry("apertus", (_PREFIX,), "apertus2509", 3),
    ),
)
