"""Calls with the names of function and parameters in attributes of tags:
`<function=NAME><parameter=KEY>value</parameter></function>` (Qwen3-Coder and related models), and
`<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>` and variants."""

from __future__ import annotations

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import Reading, TextReader, Tools

from .blocks import JsonBlock
from .tagged import TagFormat
from .values import behind

QWEN3_CODER = TagFormat()
_JSON = JsonBlock(openers=("<tool_call>",), end="</tool_call>")
SEED_OSS = TagFormat(
    blocks=("<seed:tool_call>",), block_end="</seed:tool_call>", bare=False, lines=False
)
NEMOTRON = TagFormat(undeclared=False, forgiving=False)
_TAGS = ("<function=", "</function>", "<parameter=", "</parameter>")

_WRITTEN = CallGrammar(
    "<tool_call>\n<function={name}>\n",
    "</function>\n</tool_call>",
    between="\n",
    tagged=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n", barred=QWEN3_CODER.traps),
)
_SEED_WRITTEN = CallGrammar(
    "<seed:tool_call>\n<function={name}>\n",
    "</function>\n</seed:tool_call>",
    between="\n",
    tagged=TaggedArguments("<parameter=", ">", "</parameter>\n", barred=SEED_OSS.traps),
)


def scan_coder(reader: TextReader, tools: Tools) -> Reading[None]:
    """Tags, or JSON between the same markers: these models were trained on both."""
    json = yield from behind(reader, "<tool_call>", "{")
    yield from (_JSON if json else QWEN3_CODER).scan(reader, tools)


PARSERS = (
    ToolParser(
        name="qwen3_coder",
        start="<tool_call>",
        starts=("<function=",),
        end="</tool_call>",
        scan=scan_coder,
        detect=lambda template: "<function=" in template and "<parameter=" in template,
        aliases=(
            *("qwen3_xml", "qwen3_coder_xml", "qwen3_5", "mimo"),
            *("step3p5", "step", "olmo_hybrid"),
        ),
        markers=_TAGS,
        rank=2,
        grammar=_WRITTEN,
    ),
    ToolParser(
        name="seed_oss",
        start="<seed:tool_call>",
        end="</seed:tool_call>",
        scan=SEED_OSS.scan,
        markers=_TAGS,
        detect=lambda template: "<seed:tool_call>" in template,
        aliases=("seed",),
        rank=3,
        grammar=_SEED_WRITTEN,
    ),
    ToolParser(
        name="nemotron",
        start="<tool_call>",
        starts=("<function=",),
        end="</tool_call>",
        scan=NEMOTRON.scan,
        markers=_TAGS,
        detect=lambda template: "nemotron" in template.lower() and "<function=" in template,
        aliases=("nemotron3", "nemotron_v3"),
        rank=3,
        grammar=_WRITTEN,
    ),
)


def invoke(block: str, prefix: str = "", **fields: object) -> TagFormat:
    return TagFormat(
        blocks=(f"<{block}>",) if block else (),
        block_end=f"</{block}>" if block else "",
        call=f"<{prefix}invoke",
        call_end=f"</{prefix}invoke>",
        key=f"<{prefix}parameter",
        value_end=f"</{prefix}parameter>",
        **fields,  # type: ignore[arg-type]
    )


def invocations(form: TagFormat, *, marked: bool = False) -> CallGrammar:
    """`marked`: a parameter has a mark if it is text."""
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
            untyped="json" if form.unknown == "json" else "text",
            barred=form.traps,
        ),
    )


MINIMAX_M2 = invoke("minimax:tool_call", lines=False)
DOTS = invoke("dots_function_call", bare=False, lines=False)
DSML = "｜DSML｜"
DEEPSEEK_V32 = invoke(
    f"{DSML}function_calls", DSML, bare=False, lines=False, forgiving=False, unknown="json"
)
DEEPSEEK_V4 = invoke(
    f"{DSML}tool_calls", DSML, bare=False, lines=False, forgiving=False, unknown="json"
)


def _parser(name: str, form: TagFormat, *, marked: bool = False, **fields: object) -> ToolParser:
    return ToolParser(
        name=name,
        start=form.blocks[0],
        end=form.block_end,
        scan=form.scan,
        markers=(form.call, form.call_end, form.key, form.value_end),
        grammar=invocations(form, marked=marked),
        **fields,  # type: ignore[arg-type]
    )


INVOKE_PARSERS = (
    _parser(
        "minimax_m2",
        MINIMAX_M2,
        starts=("<invoke name=",),
        detect=lambda template: "<minimax:tool_call>" in template,
        aliases=("minimax",),
        rank=3,
    ),
    _parser("dots", DOTS, detect=lambda template: "<dots_function_call>" in template, rank=3),
    _parser(
        "deepseek_v32",
        DEEPSEEK_V32,
        marked=True,
        detect=lambda template: "｜DSML｜function_calls" in template,
        rank=3,
    ),
    _parser(
        "deepseek_v4",
        DEEPSEEK_V4,
        marked=True,
        detect=lambda template: "｜DSML｜tool_calls" in template,
        aliases=("dsml", "deepseek_v4_0731"),
        rank=3,
    ),
)
