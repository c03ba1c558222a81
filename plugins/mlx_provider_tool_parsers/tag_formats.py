"""Formats that `tagged.TagFormat` describes: names inside tags (Qwen3-Coder and related models,
`<invoke name="NAME">`), or names and keys between tags (GLM, Poolside, Hunyuan)."""

from dataclasses import replace
from typing import Any

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import Reading, TextReader, Tools

from .json_text import identity
from .tagged import TagFormat


def make_tag_parser(*forms: TagFormat, **fields: Any) -> ToolParser:
    """A parser of all `forms`. `fields`: of `ToolParser`, in place of what `forms` give. For
    several `forms`, pass a `scan` that chooses between them."""
    openers: list[str] = []
    markers: list[str] = []
    for form in forms:
        openers += (*form.blocks, form.call) if form.allow_bare_calls else form.blocks
        markers += (form.call, form.call_end, form.key, form.value_end)
        markers += filter(None, (form.key_end, form.value, form.separator))
    end, *ends = (form.block_end or form.call_end for form in forms)
    defaults: dict[str, Any] = {"start": openers[0], "starts": tuple(openers[1:])}
    defaults |= {"end": end, "ends": tuple(ends), "scan": forms[0].scan, "markers": tuple(markers)}
    return ToolParser(**defaults | fields)


# ---- <function=NAME><parameter=KEY>value</parameter></function>

QWEN3_CODER = TagFormat()  # the defaults are this format
NEMOTRON = TagFormat(undeclared_call="text", close_tag_optional=False)
SEED_OSS = TagFormat(
    ("<seed:tool_call>",), "</seed:tool_call>", allow_bare_calls=False, value_on_own_lines=False
)


def _make_grammar(form: TagFormat, line: str) -> CallGrammar:
    """Each call has a block of its own. `line`: text around a value, a line end or nothing."""
    return CallGrammar(
        before=f"{form.blocks[0]}\n<function={{name}}>\n",
        after=f"</function>\n{form.block_end}",
        between="\n",
        tagged=TaggedArguments(
            "<parameter=", f">{line}", f"{line}</parameter>\n", barred=form.barred_in_values
        ),
    )


PARSERS = (
    make_tag_parser(
        QWEN3_CODER,
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
    """`<invoke name="NAME">` inside `<BLOCK>`. `prefix` goes before `invoke` and `parameter`."""
    return TagFormat(
        blocks=(f"<{block}>",),
        block_end=f"</{block}>",
        call=f"<{prefix}invoke",
        call_end=f"</{prefix}invoke>",
        key=f"<{prefix}parameter",
        value_end=f"</{prefix}parameter>",
        **{"allow_bare_calls": False, "value_on_own_lines": False, **fields},
    )


def make_invoke_grammar(form: TagFormat) -> CallGrammar:
    """The grammar of `make_invoke_format`. If untyped values are JSON, an attribute marks text."""
    marked = form.untyped_values == "json"
    text_suffix, other_suffix = ('" string="true">', '" string="false">') if marked else ("", '">')
    return CallGrammar(
        before=f'{form.call} name="{{name}}">\n',
        after=f"{form.call_end}\n",
        open=f"{form.blocks[0]}\n",
        close=form.block_end,
        tagged=TaggedArguments(
            f'{form.key} name="',
            other_suffix,
            f"{form.value_end}\n",
            text_key_after=text_suffix,
            untyped="json" if marked else "text",
            barred=form.barred_in_values,
        ),
    )


def _make_invoke_parser(name: str, form: TagFormat, aliases: str = "", **fields: Any) -> ToolParser:
    fields |= identity(name, marks=(form.blocks[0].strip("<>"),), aliases=aliases, rank=3)
    return make_tag_parser(form, grammar=make_invoke_grammar(form), **fields)


_DSML = "｜DSML｜"
_FIELDS: dict[str, Any] = {"prefix": _DSML, "close_tag_optional": False, "untyped_values": "json"}
INVOKE_PARSERS = (
    _make_invoke_parser(
        "minimax_m2",
        make_invoke_format("minimax:tool_call", allow_bare_calls=True),
        aliases="minimax",
        starts=("<invoke name=",),  # of a bare call; `<invoke` alone is text
    ),
    _make_invoke_parser("dots", make_invoke_format("dots_function_call")),
    _make_invoke_parser("deepseek_v32", make_invoke_format(f"{_DSML}function_calls", **_FIELDS)),
    _make_invoke_parser(
        "deepseek_v4",
        make_invoke_format(f"{_DSML}tool_calls", **_FIELDS),
        aliases="dsml deepseek_v4_0731",
    ),
)


# ---- <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>
# Hunyuan: a block around calls, and after NAME a tag <tool_sep>
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
        value_on_own_lines=False,
        close_tag_optional=False,
        **fields,
    )


def _make_pair_grammar(form: TagFormat, **fields: Any) -> CallGrammar:
    """With a block, each call ends with a line end; without one, line ends are between calls."""
    line = "\n" if form.blocks else ""
    key_after, value_after = f"{form.key_end}\n{form.value}", f"{form.value_end}\n"
    barred = form.barred_in_values
    return CallGrammar(
        before=f"{form.call}{{name}}{form.separator}\n",
        after=form.call_end + line,
        open="".join(form.blocks) + line,
        close=form.block_end,
        between="" if line else "\n",
        tagged=TaggedArguments(form.key, key_after, value_after, barred=barred, **fields),
    )


GLM = _make_pair_format(untyped_values="json")
OPENSOURCE = ":opensource"
"""Suffix of every tag in some published weights."""
_HY_V3 = _make_pair_format("tool_calls", separator="tool_sep", undeclared_call="text")
_HY_OPEN = _make_pair_format("tool_calls", OPENSOURCE, "tool_sep", undeclared_call="text")


def scan_hy_v3(reader: TextReader, tools: Tools) -> Reading[None]:
    """Read a block of Hunyuan's format, with or without the suffix in its tags."""
    with_suffix = yield from reader.at(*_HY_OPEN.blocks, _HY_OPEN.call)
    yield from (_HY_OPEN if with_suffix else _HY_V3).scan(reader, tools)


def _make_hy_v3(form: TagFormat, other: TagFormat, **fields: Any) -> ToolParser:
    """A parser that reads both formats, and whose grammar is that of `form`."""
    grammar = _make_pair_grammar(form)
    return make_tag_parser(form, other, scan=scan_hy_v3, atomic=True, grammar=grammar, **fields)


PAIR_PARSERS = (
    make_tag_parser(
        GLM,
        cut="drop",
        grammar=_make_pair_grammar(GLM, untyped="json"),
        **identity("glm47", marks=(GLM.key,), aliases="glm glm4 glm45 glm46 glm4_moe", rank=3),
    ),
    make_tag_parser(
        replace(GLM, undeclared_call="nothing"),
        cut="drop",
        detect=lambda template: "<arg_key>" in template and "poolside" in template.lower(),
        grammar=_make_pair_grammar(GLM, untyped="json"),
        **identity("poolside_v1", aliases="poolside", rank=4),
    ),
    _make_hy_v3(_HY_V3, _HY_OPEN, **identity("hy_v3", marks=("<tool_sep",), rank=4)),
    _make_hy_v3(
        _HY_OPEN, _HY_V3, **identity("hy_v3_opensource", marks=("<tool_sep", OPENSOURCE), rank=5)
    ),
)
