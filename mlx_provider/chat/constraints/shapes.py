"""How tool-call formats look from the writing side: what a grammar has to force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Tagged:
    """Arguments written one by one: `key_before KEY key_after VALUE value_after`.

    In `value_after`, `{key}` stands for the parameter's name.
    """

    key_before: str
    key_after: str
    value_after: str
    between: str = ""
    """Text between two arguments."""
    text: tuple[str, str] | None = ("", "")
    """What stands around a text value; `None`: it is written as a JSON string."""
    text_key_after: str = ""
    """`key_after` of a text value, where the format tells the two apart."""
    escapes: bool = True
    """Whether JSON strings inside values may hold escapes."""
    keywords: bool = False
    """Keys are Python's keywords; a call with others is written with one JSON object."""


@dataclass(frozen=True)
class CallShape:
    """One tool-call format: `open before ARGUMENTS after [between before ...] close`.

    In `before`, `{name}` stands for the tool's name and `{digits}` for a number.
    """

    before: str
    after: str
    open: str = ""
    close: str = ""
    between: str | None = ""
    """Text between two calls; `None`: the format knows one call a reply."""
    tagged: Tagged | None = None
    """`None`: the arguments are one JSON object."""


@dataclass(frozen=True)
class Messages:
    """How a format that addresses every message writes one."""

    thought: str
    """What opens a thought."""
    thought_end: str
    next: str
    """What opens the message after a thought."""
    answer: str
    """What opens an answer."""


MESSAGES: Mapping[str, Messages] = MappingProxyType(
    {
        "harmony": Messages(
            "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant",
            "<|channel|>final<|message|>",
        )
    }
)  # fmt: skip
"""By the name of the reasoning parser."""


def json_shape(
    start: str, end: str, key: str = "arguments", between: str | None = "\n"
) -> CallShape:
    """A JSON object of name and arguments between two markers."""
    return CallShape(
        f'{start}{{"name": "{{name}}", "{key}": ', f"}}{end}", between=between if end else None
    )


def list_shape(start: str, end: str) -> CallShape:
    """A JSON list of such objects after a marker."""
    call = json_shape("", "")
    return CallShape(call.before, call.after, f"{start}[", f"]{end}", between=", ")


_PARAMETERS = Tagged("<parameter=", ">\n", "\n</parameter>\n")
_ARG_KEYS = Tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
_KEYWORDS = Tagged("", "=", "", between=", ", text=None, keywords=True)
_MINIMAX_M3 = "]<]minimax[>["


def _function_tags(opener: str, closer: str) -> CallShape:
    return CallShape(
        f"{opener}\n<function={{name}}>\n", f"</function>\n{closer}", between="\n",
        tagged=_PARAMETERS,
    )  # fmt: skip


def _invocations(block: str, prefix: str = "", *, marked: bool = False) -> CallShape:
    """Invocations in a block; `marked`: every parameter tells whether it is text."""
    key, end = f'<{prefix}parameter name="', f"</{prefix}parameter>\n"
    text, other = ('" string="true">', '" string="false">') if marked else ("", '">')
    return CallShape(
        f'<{prefix}invoke name="{{name}}">\n', f"</{prefix}invoke>\n", f"<{block}>\n",
        f"</{block}>", tagged=Tagged(key, other, end, text_key_after=text),
    )  # fmt: skip


def _braces(opener: str, closer: str, quote: str) -> CallShape:
    tagged = Tagged("", ":", "", between=",", text=(quote, quote), escapes=False)
    return CallShape(f"{opener}call:{{name}}{{", f"}}{closer}", tagged=tagged)


SHAPES: Mapping[str, CallShape] = MappingProxyType(
    {
        "hermes": json_shape("<tool_call>\n", "\n</tool_call>"),
        "longcat": json_shape("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
        "llama3_json": json_shape("", "", key="parameters"),
        "granite_20b_fc": json_shape("<function_call>", ""),
        "gigachat3": json_shape("<|function_call|>", ""),
        "internlm": json_shape("<|action_start|><|plugin|>", "<|action_end|>", key="parameters"),
        "mistral": list_shape("[TOOL_CALLS]", ""),
        "jamba": list_shape("<tool_calls>", "</tool_calls>"),
        "granite": list_shape("<|tool_call|>", ""),
        "phi4": list_shape("functools", ""),
        "xlam": list_shape("", ""),
        "nemotron_json": list_shape("<TOOLCALL>", "</TOOLCALL>"),
        "apertus": CallShape(
            '{"{name}": ', "}", "<|tools_prefix|>[", "]<|tools_suffix|>", between=", "
        ),
        "functionary": CallShape("<function={name}>", "</function>"),
        "llama4_pythonic": CallShape(
            "{name}(", ")", "[", "]", between=", ", tagged=_KEYWORDS
        ),
        "lfm2": CallShape(
            "{name}(", ")", "<|tool_call_start|>[", "]<|tool_call_end|>", between=", ",
            tagged=_KEYWORDS,
        ),
        "olmo3": CallShape(
            "{name}(", ")", "<function_calls>", "</function_calls>", between="\n",
            tagged=_KEYWORDS,
        ),
        "gemma4": _braces("<|tool_call>", "<tool_call|>", '<|"|>'),
        "functiongemma": _braces("<start_function_call>", "<end_function_call>", "<escape>"),
        "qwen3_coder": _function_tags("<tool_call>", "</tool_call>"),
        "nemotron": _function_tags("<tool_call>", "</tool_call>"),
        "seed_oss": CallShape(
            "<seed:tool_call>\n<function={name}>\n", "</function>\n</seed:tool_call>",
            between="\n", tagged=Tagged("<parameter=", ">", "</parameter>\n"),
        ),
        "minimax_m2": _invocations("minimax:tool_call"),
        "dots": _invocations("dots_function_call"),
        "muse": _invocations("atem:function_calls", "atem:"),
        "deepseek_v32": _invocations("｜DSML｜function_calls", "｜DSML｜", marked=True),
        "deepseek_v4": _invocations("｜DSML｜tool_calls", "｜DSML｜", marked=True),
        "step3": CallShape(
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">',
            "</steptml:invoke><｜tool_call_end｜>",
            "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>",
            tagged=Tagged('<steptml:parameter name="', '">', "</steptml:parameter>"),
        ),
        "minimax_m3": CallShape(
            f'{_MINIMAX_M3}<invoke name="{{name}}">', f"{_MINIMAX_M3}</invoke>",
            f"{_MINIMAX_M3}<tool_call>", f"{_MINIMAX_M3}</tool_call>",
            tagged=Tagged(f"{_MINIMAX_M3}<", ">", f"{_MINIMAX_M3}</{{key}}>"),
        ),
        "minicpm5": CallShape(
            '<function name="{name}">', "</function>",
            tagged=Tagged('<param name="', '"><![CDATA[', "]]></param>"),
        ),
        "glm45": CallShape(
            "<tool_call>{name}\n", "</tool_call>", between="\n", tagged=_ARG_KEYS
        ),
        "poolside_v1": CallShape(
            "<tool_call>{name}\n", "</tool_call>", between="\n", tagged=_ARG_KEYS
        ),
        "hy_v3": CallShape(
            "<tool_call>{name}<tool_sep>\n", "</tool_call>\n", "<tool_calls>\n",
            "</tool_calls>", tagged=_ARG_KEYS,
        ),
        "deepseek_v3": CallShape(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", between="\n",
        ),
        "deepseek_v31": CallShape(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        ),
        "kimi_k2": CallShape(
            "<|tool_call_begin|>functions.{name}:{digits}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        ),
        "harmony": CallShape(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>", "",
            between=None,
        ),
    }
)  # fmt: skip


def shape_for(names: Iterable[str], start: str = "", end: str = "") -> CallShape:
    """The shape of the first format that is known by one of `names`.

    An unknown format is taken for JSON between its markers.
    """
    known = next((SHAPES[name] for name in names if name in SHAPES), None)
    if known is not None:
        return known
    return json_shape(f"{start}\n" if start else "", f"\n{end}" if end else "")
