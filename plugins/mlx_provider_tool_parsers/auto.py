"""Two formats. `auto` recognises calls of any format by their first marker, for models whose chat
template shows no known format. `muse` addresses each message to the model itself or to the user,
and writes calls as `atem:` tags."""

import re

from mlx_provider import ReasoningParser, ToolParser
from mlx_provider.records import (
    Emit,
    Reading,
    TextReader,
    Tools,
    read_block,
    read_turn_ends,
    scan_block,
)

from . import gemma, json_blocks, pythonic, sections
from .json_blocks import CALLING, scan_calling
from .json_text import JsonBlock, identity
from .pythonic import scan_list
from .tag_formats import (
    GLM,
    INVOKE_PARSERS,
    PAIR_PARSERS,
    QWEN3_CODER,
    make_invoke_format,
    make_invoke_grammar,
)
from .values import behind

TURN_ENDS = tuple(
    (
        "<|im_end|> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> </s> <|end|> <|return|> "
        "<|call|> <|eom|> <|eot|> <|EOT|> <|eos|> <eos> <end_of_turn> <turn|> "
        "<start_function_response> <|tool_response> <|eoa|> <|message_sep|> <|observation|> "
        "<|user|> <|end_of_sentence|> <seed:eos> <｜end▁of▁sentence｜> <｜hy_eos｜> "
        "<｜hy_eos:opensource｜> <|assistant_end|> <|END_OF_TURN_TOKEN|> </longcat_s> [e~[ [EOS] "
        "[|endofturn|] <|endofresponse|> <|end_of_role|>"
    ).split()
)
"""Markers that end a turn, of all families. A model that has learned the calls of another family
writes the markers of that family after them, as text."""
_JSON = JsonBlock(openers=("<tool_call>", "<|tool_call|>", "[", "{"), end="</tool_call>")
_DISTINCT = (*INVOKE_PARSERS, *sections.PARSERS, *gemma.PARSERS, *json_blocks.PARSERS)
_SHARED = ("<tool_call>", "<|tool_call|>", "<function=", CALLING, "[", "{")
"""Openers of several formats: the text after such an opener shows which format it is."""
_SCAN_BY_OPENER = {
    opener: parser.scan
    for parser in reversed(_DISTINCT)  # the first one counts
    for opener in parser.openers()
    if parser.scan is not None and opener not in (*_SHARED, "<tool_calls>", "```json")
}
"""`ToolParser.scan` by opener, for all other openers."""


def scan(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read one block of calls in the format that its opener, or the text after that, shows."""
    found = yield from reader.at(*_SCAN_BY_OPENER, *_SHARED)
    if found in _SCAN_BY_OPENER:
        yield from _SCAN_BY_OPENER[found](reader, tools)
    elif found == "<function=":
        yield from QWEN3_CODER.scan(reader, tools)
    elif found == CALLING:
        yield from scan_calling(reader)
    elif found == "[":
        yield from _list(reader, tools)
    elif found in ("<tool_call>", "<|tool_call|>"):
        yield from _tool_call(reader, tools, found)
    else:
        yield from _JSON.scan(reader, tools)


def _tool_call(reader: TextReader, tools: Tools, opener: str) -> Reading[None]:
    following = yield from behind(reader, opener, "{", "[", "<")
    if following in ("{", "[") or opener != "<tool_call>":
        yield from _JSON.scan(reader, tools)
    elif following == "<":
        yield from QWEN3_CODER.scan(reader, tools)
    else:
        yield from GLM.scan(reader, tools)


def _list(reader: TextReader, tools: Tools) -> Reading[None]:
    scan_one = _JSON.scan if (yield from behind(reader, "[", "{")) else scan_list
    yield from scan_one(reader, tools)


_ALL = (*_DISTINCT, *PAIR_PARSERS, *pythonic.PARSERS)
PARSERS = (
    ToolParser(
        name="auto",
        start="<tool_call>",
        starts=tuple(x for x in (*_SHARED, *_SCAN_BY_OPENER) if x not in ("<tool_call>", "{")),
        first=("{",),
        end="</tool_call>",
        scan=scan,
        markers=tuple({marker: None for parser in _ALL for marker in parser.visible()}),
        aliases=("generic",),
        grammar=json_blocks.TAGGED_GRAMMAR,
        fallback="read",
    ),
)


# ---- Muse
FORM = make_invoke_format("atem:function_calls", "atem:", close_tag_optional=False)
START, MESSAGE, ENDS = "<|start|>", "<|message|>", ("<|eom|>", "<|eot|>")
MARKERS = (START, MESSAGE, *ENDS, FORM.call, FORM.call_end, FORM.key, FORM.value_end)
_ADDRESSEE = re.compile(r"[^\s<]*")


def _is_muse(template: str) -> bool:
    return "<atem:function_calls>" in template or "to=self" in template


def read_muse(reader: TextReader, tools: Tools | None) -> Reading[None]:
    """Read a whole reply: ` to=self<|message|>thoughts<|eom|><|start|>assistant to=user...`. The
    prompt may end inside the first header. If `tools` is `None`, calls are content."""
    addressee = yield from _header(reader, begun=True)
    while (yield from reader.peek()):
        if addressee is None:
            yield from _body(reader, reader.content, tools, headed=False)
        elif addressee == "self":
            reader.reason()
            yield from _body(reader, reader.reasoning, None)
            reader.answer()
        else:
            yield from _body(reader, reader.content, tools)
        addressee = yield from _header(reader)


def _header(reader: TextReader, *, begun: bool = False) -> Reading[str | None]:
    """Read a header. Returns its addressee, by default "user"; `None`: no header, nothing was read.
    `begun`: the header may begin in the prompt."""
    mark = reader.mark()
    started = yield from reader.accept(START)
    yield from reader.space()
    yield from reader.accept("assistant")
    yield from reader.space()
    recipient = yield from reader.accept("to=", *(("=",) if begun else ()))
    addressee = yield from reader.run(_ADDRESSEE)
    known = bool(recipient) or (begun and addressee in ("self", "user", ""))
    if (known or started) and (yield from reader.accept(MESSAGE)):
        reader.drop_mark()
        return addressee or "user"
    reader.rewind(mark)
    return None


def _body(
    reader: TextReader, emit: Emit, tools: Tools | None, *, headed: bool = True
) -> Reading[None]:
    """Read a message and its end marker. Without a header before it (`headed` is false), read up to
    the next `START`, which stays unread. Calls are reported unless `tools` is `None`."""
    block, ends = FORM.blocks[0], ENDS if headed else (START,)
    stops = (*ends, block) if tools is not None else ends
    if not headed:  # a `START` here begins no header: it is text
        emit((yield from reader.accept(START)))
    while True:
        found = yield from reader.pass_until(stops, emit)
        if found != block:
            reader.skip(len(found) if headed else 0)
            return
        scan = scan_block(CALLS, reader, tools or ())
        called = yield from read_block(reader, scan, CALLS, block, emit, tools or ())
        reader.forget_marks()
        if called and not headed:
            space = yield from read_turn_ends(reader, TURN_ENDS, (START, block), CALLS.visible())
            emit(space if (yield from reader.peek()) else "")


CALLS = ToolParser(
    start=FORM.blocks[0],
    end=FORM.block_end,
    scan=FORM.scan,
    atomic=True,
    whole=read_muse,
    markers=MARKERS,
    detect=_is_muse,
    grammar=make_invoke_grammar(FORM),
    **identity("muse", aliases="muse_glimmer muse_spark atem", rank=3),
)
MUSE_PARSERS = (CALLS,)
REASONING_PARSERS = (
    ReasoningParser(
        start="",
        end="",
        whole=read_muse,
        markers=(*MARKERS, FORM.blocks[0], FORM.block_end),
        detect=_is_muse,
        **identity("muse", aliases="muse_glimmer", rank=3),
    ),
)
