"""Reasoning formats of families: thoughts between `<think>` and `</think>`, or other markers."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from mlx_provider import ReasoningParser, hookimpl

CALL = ("<minimax:tool_call>", "")
DSML = ("<｜DSML｜", "")
CALLS = (("<tool_call>", "{<"), ("<function=", ""), CALL)

QWEN3 = ReasoningParser(
    name="qwen3",
    start="<think>",
    end="</think>",
    detect=lambda template: "</think>" in template or "<think>" in template,
    aliases=(
        *("think", "qwen3_5", "qwen", "olmo3", "smollm3", "deepseek_r1_distill", "mimo"),
        *("interns1",),
    ),
    calls=CALLS,
)
"""Also the generic one: unmarked text is the answer, unless a closer follows it."""


def think(
    name: str, aliases: str = "", mark: str = "", also: str = "", rank: int = 1, **fields: Any
) -> ReasoningParser:
    """Thoughts as in `QWEN3`. `mark`, `also`: texts of its chat template; `also` in any case."""

    def detect(template: str) -> bool:
        return bool(mark) and mark in template and also in template.lower()

    own: dict[str, Any] = {"aliases": tuple(aliases.split()), "detect": detect, "rank": rank}
    return replace(QWEN3, name=name, **own | fields)


def pair(name: str, start: str, end: str, **fields: Any) -> ReasoningParser:
    detect: Callable[[str], bool] = lambda template: start in template  # noqa: E731
    return ReasoningParser(name, start, end, **{"detect": detect, "rank": 2, **fields})


ALWAYS: dict[str, Any] = {"unmarked": "reasoning"}
"""Models that always think first: their template writes the opener, or they may omit it."""
HY_V3_CALLS = (*CALLS, ("<tool_calls", ""), ("<tool_call:opensource>", ""))
HY_V3 = think(
    "hy_v3", "hunyuan", "<tool_sep", "<think", 2,
    starts=("<think:opensource>",), ends=("</think:opensource>",), calls=HY_V3_CALLS,
)  # fmt: skip
"""Some published weights write `:opensource` into every marker. With it in `start` and `end`, a
grammar and the prompt use the marker that is one token."""
HY_V3_OPEN = think(
    "hy_v3_opensource", "", "<tool_sep", "<think", 3,
    start=HY_V3.starts[0], end=HY_V3.ends[0], starts=(HY_V3.start,), ends=(HY_V3.end,),
    calls=HY_V3_CALLS,
    detect=lambda template: HY_V3.detect(template) and ":opensource" in template,
)  # fmt: skip
R1 = "deepseek_r1_0528 qwen3_thinking nemotron_nano vibethinker holo2"
V3_CALLS = (DSML, ("<｜tool▁calls▁begin｜>", ""))
M2_CALLS = (CALL, ("<tool_call>", ""), ("<invoke name=", ""))
RESPONSE = ("<response>", "</response>")
NEMOTRON = "nemotron nemotron_3 nano_v3 super_v3"

PARSERS = (
    QWEN3,
    think("deepseek_r1", R1, "<｜Assistant｜><think>", **ALWAYS),
    think(
        *("deepseek_v3", "deepseek_v31 deepseek_v32", "<｜Assistant｜>", "thinking", 2),
        calls=V3_CALLS,
    ),
    think(
        *("deepseek_v4", "", "｜DSML｜tool_calls"), rank=3, calls=(DSML,), unmarked_call="reasoning"
    ),
    think("glm4", "glm glm4_moe glm45 glm46 glm47 poolside_v1", "<arg_key>", "think"),
    think("minimax_m2", "minimax", "<minimax:tool_call>", calls=M2_CALLS, **ALWAYS),
    ReasoningParser(
        name="minimax_m2_append",
        start="",
        end="",
        prefix="<think>",
        unmarked="content",
        aliases=("minimax_append_think", "minimax_m2_append_think"),
    ),
    think("granite_thinking", "granite4", "<think>", "granite"),
    think("step3p5", "step3 step", rank=0, **ALWAYS),
    think("ernie45", "ernie", "</think>", "<response>", hidden=RESPONSE, **ALWAYS),
    think(
        *("kimi_k2", "kimi", "<|im_middle|>", "<think>"),
        starts=("◁think▷",),
        ends=("◁/think▷",),
        calls=(("<|tool_calls_section_begin|>", ""),),
    ),
    HY_V3,
    HY_V3_OPEN,
    think("hunyuan_a13b", "", "<answer>", "<think>", hidden=("<answer>", "</answer>")),
    think("nemotron_v3", NEMOTRON, "<think>", "nemotron"),
    pair("seed_oss", "<seed:think>", "</seed:think>", rank=1, calls=(("<seed:tool_call>", ""),)),
    pair(
        *("mistral", "[THINK]", "[/THINK]"),
        rank=1,
        aliases=("magistral",),
        calls=(("[TOOL_CALLS]", ""),),
    ),
    pair("gemma4", "<|channel>", "<channel|>", header="thought", calls=(("<|tool_call>", ""),)),
    pair(
        *("granite", "Here is my thought process:", "Here is my response:"),
        starts=("Here's my thought process:",),
        ends=("Here's my response:",),
        calls=(("<|tool_call|>", ""), ("<tool_call>", "")),
    ),
    pair(
        *("north", "<|START_THINKING|>", "<|END_THINKING|>"),
        ends=("<|START_TEXT|>", "<|START_RESPONSE|>"),
        hidden=("<|END_TEXT|>", "<|END_RESPONSE|>"),
        unmarked="reasoning",
        calls=(("<|START_ACTION|>", ""),),
        aliases=("cohere", "command_a", "cohere_command3", "cohere_command4"),
    ),
)


mlx_provider_api = 1


@hookimpl
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:
    yield from PARSERS
