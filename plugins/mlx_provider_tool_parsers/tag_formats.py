"""The formats of `tagged`: names in attributes of tags (Qwen3-Coder and related models, and
`<invoke name="NAME">` with variants), and names and keys between tags (GLM, Poolside, Hunyuan)."""

from dataclasses import replace
from typing import Any

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import Reading, TextReader, Tools

from .json_blocks import TAGGED_JSON
from .json_text import identity
from .tagged import TagFormat
from .values import behind


def make_tag_parser(form: TagFormat, **fields: Any) -> ToolParser:
    openers = (*form.blocks, form.call) if form.bare else form.blocks
    tags = (form.call, form.call_end, form.key, form.value_end)
    further_tags = filter(None, (form.key_end, form.value, form.separator))
    defaults: dict[str, Any] = {
        "start": openers[0],
        "starts": openers[1:],
        "end": form.block_end or form.call_end,
        "scan": form.scan,
        "markers": (*tags, *further_tags),
    }
    return ToolParser(**defaults | fields)


# ---- <function=NAME><parameter=KEY>value</parameter></function>

QWEN3_CODER = TagFormat()  # the defaults are this format
NEMOTRON = TagFormat(undeclared="text", forgiving=False)
SEED_OSS = TagFormat(("<seed:tool_call>",), "</seed:tool_call>", bare=False, lines=False)


def _make_grammar(form: TagFormat, line: str) -> CallGrammar:
    """`line`: text around a value, a line end or nothing."""
    return CallGrammar(
        f"{form.blocks[0]}\n<function={{name}}>\n",
        f"</function>\n{form.block_end}",
        between="\n",
        tagged=TaggedArguments(
            "<parameter=", f">{line}", f"{line}</parameter>\n", barred=form.traps
        ),
    )


def scan_coder(reader: TextReader, tools: Tools) -> Reading[None]:
    """Tags, or JSON between the same markers: these models were trained on both."""
    is_json = yield from behind(reader, "<tool_call>", "{")
    yield from (TAGGED_JSON if is_json else QWEN3_CODER).scan(reader, tools)


PARSERS = (
    make_tag_parser(
        QWEN3_CODER,
        scan=scan_coder,
        grammar=_make_grammar(QWEN3_CODER, "\n"),
        **identity(
            "qwen3_coder",
            marks=("<function=", "<parameter="),
            aliases="qwen3_xml qwen3_coder_xml qwen3_5 mimo step3p5 step olmo_hybrid",
        ),
    ),
    make_tag_parser(
        SEED_OSS,
        grammar=_make_grammar(SEED_OSS, ""),
        **identity("seed_oss", marks=SEED_OSS.blocks, aliases="seed", rank=3),
    ),
    make_tag_parser(
        NEMOTRON,
        detect=lambda template: "nemotron" in template.lower() and "<function=" in template,
        # also bars `<parameter=` in values, which this parser would accept
        grammar=_make_grammar(QWEN3_CODER, "\n"),
        **identity("nemotron", aliases="nemotron3 nemotron_v3", rank=3),
    ),
)


# ---- <invoke name="NAME"><parameter name="KEY">value</parameter></invoke>


def make_invoke_format(block: str, prefix: str = "", **fields: Any) -> TagFormat:
    return TagFormat(
        blocks=(f"<{block}>",),
        block_end=f"</{block}>",
        call=f"<{prefix}invoke",
        call_end=f"</{prefix}invoke>",
        key=f"<{prefix}parameter",
        value_end=f"</{prefix}parameter>",
        **{"bare": False, "lines": False, **fields},
    )


def make_invoke_grammar(form: TagFormat) -> CallGrammar:
    """If untyped values are JSON, `string="true"` marks parameters that are text."""
    marked = form.unknown == "json"
    text_suffix, other_suffix = ('" string="true">', '" string="false">') if marked else ("", '">')
    return CallGrammar(
        f'{form.call} name="{{name}}">\n',
        f"{form.call_end}\n",
        f"{form.blocks[0]}\n",
        form.block_end,
        tagged=TaggedArguments(
            f'{form.key} name="',
            other_suffix,
            f"{form.value_end}\n",
            text_key_after=text_suffix,
            untyped="json" if marked else "text",
            barred=form.traps,
        ),
    )


def _make_invoke_parser(
    name: str, form: TagFormat, starts: tuple[str, ...] = (), aliases: str = ""
) -> ToolParser:
    fields = identity(name, marks=(form.blocks[0].strip("<>"),), aliases=aliases, rank=3)
    return make_tag_parser(form, grammar=make_invoke_grammar(form), starts=starts, **fields)


_DSML = "｜DSML｜"
_MARKED: dict[str, Any] = {"prefix": _DSML, "forgiving": False, "unknown": "json"}
INVOKE_PARSERS = (
    _make_invoke_parser(
        "minimax_m2",
        make_invoke_format("minimax:tool_call", bare=True),
        starts=("<invoke name=",),
        aliases="minimax",
    ),
    _make_invoke_parser("dots", make_invoke_format("dots_function_call")),
    _make_invoke_parser("deepseek_v32", make_invoke_format(f"{_DSML}function_calls", **_MARKED)),
    _make_invoke_parser(
        "deepseek_v4",
        make_invoke_format(f"{_DSML}tool_calls", **_MARKED),
        aliases="dsml deepseek_v4_0731",
    ),
)


# ---- NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>


def _make_pair_format(
    block: str = "", suffix: str = "", separator: str = "", **fields: Any
) -> TagFormat:
    """`suffix`: text before the `>` of each tag."""

    def tag(name: str) -> str:
        return f"<{name}{suffix}>"

    return TagFormat(
        blocks=(tag(block),) if block else (),
        block_end=tag(f"/{block}") if block else "",
        call=tag("tool_call"),
        call_end=tag("/tool_call"),
        separator=tag(separator) if separator else "",
        key=tag("arg_key"),
        key_end=tag("/arg_key"),
        value=tag("arg_value"),
        value_end=tag("/arg_value"),
        lines=False,
        forgiving=False,
        **fields,
    )


def _make_pair_grammar(form: TagFormat, **fields: Any) -> CallGrammar:
    """With a block, each call ends with a line end; without one, line ends are between calls."""
    line = "\n" if form.blocks else ""
    return CallGrammar(
        f"{form.call}{{name}}{form.separator}\n",
        form.call_end + line,
        "".join(form.blocks) + line,
        form.block_end,
        between="" if line else "\n",
        tagged=TaggedArguments(
            form.key,
            f"{form.key_end}\n{form.value}",
            f"{form.value_end}\n",
            barred=(form.call,),
            **fields,
        ),
    )


GLM = _make_pair_format(unknown="json")
OPENSOURCE = ":opensource"
"""Suffix of every tag in some published weights."""
_HY_V3 = _make_pair_format("tool_calls", separator="tool_sep", undeclared="text")
_HY_OPEN = _make_pair_format("tool_calls", OPENSOURCE, "tool_sep", undeclared="text")


def scan_hy_v3(reader: TextReader, tools: Tools) -> Reading[None]:
    with_suffix = yield from reader.at(*_HY_OPEN.blocks, _HY_OPEN.call)
    yield from (_HY_OPEN if with_suffix else _HY_V3).scan(reader, tools)


def _make_hy_v3(form: TagFormat, **fields: Any) -> ToolParser:
    """Reads both forms, and writes `form`."""
    parser = make_tag_parser(form, **fields)
    other = make_tag_parser(_HY_OPEN if form is _HY_V3 else _HY_V3, **fields)
    return replace(
        parser,
        starts=(*parser.starts, other.start, *other.starts),
        ends=(other.end,),
        scan=scan_hy_v3,
        atomic=True,
        markers=(*parser.markers, *other.markers),
        grammar=_make_pair_grammar(form),
    )


PAIR_PARSERS = (
    make_tag_parser(
        GLM,
        cut="drop",
        grammar=_make_pair_grammar(GLM, untyped="json"),
        **identity("glm47", marks=(GLM.key,), aliases="glm glm4 glm45 glm46 glm4_moe", rank=3),
    ),
    make_tag_parser(
        replace(GLM, undeclared="nothing"),
        cut="drop",
        detect=lambda template: "<arg_key>" in template and "poolside" in template.lower(),
        grammar=_make_pair_grammar(GLM, untyped="json"),
        **identity("poolside_v1", aliases="poolside", rank=4),
    ),
    _make_hy_v3(_HY_V3, **identity("hy_v3", marks=("<tool_sep",), rank=4)),
    _make_hy_v3(_HY_OPEN, **identity("hy_v3_opensource", marks=("<tool_sep", OPENSOURCE), rank=5)),
)
