"""`<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>` and variants."""

from __future__ import annotations

from mlx_provider import CallGrammar, TaggedArguments, ToolParser

from .tagged import TagFormat


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


PARSERS = (
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
