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


def tag_parser(form: TagFormat, **fields: Any) -> ToolParser:
    openers = (*form.blocks, form.call) if form.bare else form.blocks
    tags = (form.call, form.call_end, form.key, form.value_end)
    further_tags = filter(None, (form.key_end, form.value, form.separator))
    own: dict[str, Any] = {
        "start": openers[0],
        "starts": openers[1:],
        "end": form.block_end or form.call_end,
        "scan": form.scan,
        "markers": (*tags, *further_tags),
    }
    return ToolParser(**own | fields)


# ---- <function=NAME><parameter=KEY>value</parameter></function>

QWEN3_CODER = TagFormat()  # the defaults are this format
NEMOTRON = TagFormat(undeclared="text", forgiving=False)
SEED_OSS = TagFormat(("<seed:tool_call>",), "</seed:tool_call>", bare=False, lines=False)


def _function_grammar(form: TagFormat, line: str) -> CallGrammar:
    """`line`: line end around a value."""
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
    tag_parser(
        QWEN3_CODER,
        scan=scan_coder,
        grammar=_function_grammar(QWEN3_CODER, "\n"),
        **identity(
            "qwen3_coder",
            marks=("<function=", "<parameter="),
            aliases="qwen3_xml qwen3_coder_xml qwen3_5 mimo step3p5 step olmo_hybrid",
        ),
    ),
    tag_parser(
        SEED_OSS,
        grammar=_function_grammar(SEED_OSS, ""),
        **identity("seed_oss", marks=SEED_OSS.blocks, aliases="seed", rank=3),
    ),
    tag_parser(
        NEMOTRON,
        detect=lambda template: "nemotron" in template.lower() and "<function=" in template,
        # bars more than this parser needs: `<parameter=` in values
        grammar=_function_grammar(QWEN3_CODER, "\n"),
        **identity("nemotron", aliases="nemotron3 nemotron_v3", rank=3),
    ),
)


# ---- <invoke name="NAME"><parameter name="KEY">value</parameter></invoke>


def invoke_format(block: str, prefix: str = "", **fields: Any) -> TagFormat:
    return TagFormat(
        blocks=(f"<{block}>",),
        block_end=f"</{block}>",
        call=f"<{prefix}invoke",
        call_end=f"</{prefix}invoke>",
        key=f"<{prefix}parameter",
        value_end=f"</{prefix}parameter>",
        **{"bare": False, "lines": False, **fields},
    )


def invoke_grammar(form: TagFormat) -> CallGrammar:
    """A format whose untyped values are JSON marks the parameters that are text."""
    marked = form.unknown == "json"
    text, other = ('" string="true">', '" string="false">') if marked else ("", '">')
    return CallGrammar(
        f'{form.call} name="{{name}}">\n',
        f"{form.call_end}\n",
        f"{form.blocks[0]}\n",
        form.block_end,
        tagged=TaggedArguments(
            f'{form.key} name="',
            other,
            f"{form.value_end}\n",
            text_key_after=text,
            untyped="json" if marked else "text",
            barred=form.traps,
        ),
    )


def _invoke_parser(
    name: str, form: TagFormat, starts: tuple[str, ...] = (), aliases: str = ""
) -> ToolParser:
    fields = identity(name, marks=(form.blocks[0].strip("<>"),), aliases=aliases, rank=3)
    return tag_parser(form, grammar=invoke_grammar(form), starts=starts, **fields)


_DSML = "｜DSML｜"
_MARKED: dict[str, Any] = {"prefix": _DSML, "forgiving": False, "unknown": "json"}
INVOKE_PARSERS = (
    _invoke_parser(
        "minimax_m2",
        invoke_format("minimax:tool_call", bare=True),
        starts=("<invoke name=",),
        aliases="minimax",
    ),
    _invoke_parser("dots", invoke_format("dots_function_call")),
    _invoke_parser("deepseek_v32", invoke_format(f"{_DSML}function_calls", **_MARKED)),
    _invoke_parser(
        "deepseek_v4",
        invoke_format(f"{_DSML}tool_calls", **_MARKED),
        aliases="dsml deepseek_v4_0731",
    ),
)


# ---- NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>


def _pair_format(
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


def _pair_grammar(form: TagFormat, **fields: Any) -> CallGrammar:
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


GLM = _pair_format(unknown="json")
OPENSOURCE = ":opensource"
"""Some published weights write it into every tag."""
_HY_V3 = _pair_format("tool_calls", separator="tool_sep", undeclared="text")
_HY_V3_OPEN = _pair_format("tool_calls", OPENSOURCE, "tool_sep", undeclared="text")


def scan_hy_v3(reader: TextReader, tools: Tools) -> Reading[None]:
    opened = yield from reader.at(*_HY_V3_OPEN.blocks, _HY_V3_OPEN.call)
    yield from (_HY_V3_OPEN if opened else _HY_V3).scan(reader, tools)


def _hy_v3(form: TagFormat, **fields: Any) -> ToolParser:
    own = tag_parser(form, **fields)
    other = tag_parser(_HY_V3_OPEN if form is _HY_V3 else _HY_V3, **fields)
    return replace(
        own,
        starts=(*own.starts, other.start, *other.starts),
        ends=(other.end,),
        scan=scan_hy_v3,
        atomic=True,
        markers=(*own.markers, *other.markers),
        grammar=_pair_grammar(form),
    )


PAIR_PARSERS = (
    tag_parser(
        GLM,
        cut="drop",
        grammar=_pair_grammar(GLM, untyped="json"),
        **identity("glm47", marks=(GLM.key,), aliases="glm glm4 glm45 glm46 glm4_moe", rank=3),
    ),
    tag_parser(
        replace(GLM, undeclared="nothing"),
        cut="drop",
        detect=lambda template: "<arg_key>" in template and "poolside" in template.lower(),
        grammar=_pair_grammar(GLM, untyped="json"),
        **identity("poolside_v1", aliases="poolside", rank=4),
    ),
    _hy_v3(_HY_V3, **identity("hy_v3", marks=("<tool_sep",), rank=4)),
    _hy_v3(_HY_V3_OPEN, **identity("hy_v3_opensource", marks=("<tool_sep", OPENSOURCE), rank=5)),
)
