"""Reasoning formats of families: thoughts between `<think>` and `</think>`, or other markers."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mlx_provider import ReasoningParser, hookimpl

mlx_provider_api = 1
CALL = ("<minimax:tool_call>", "")
DSML = ("<｜DSML｜", "")
CALLS = (("<tool_call>", "{<"), ("<function=", ""), CALL)
"""Calls that end a thought: an opener, and the characters of which one must follow; empty: any."""
QWEN3 = ReasoningParser(
    name="qwen3",
    start="<think>",
    end="</think>",
    detect=lambda template: "</think>" in template or "<think>" in template,
    aliases=tuple("think qwen3_5 qwen olmo3 smollm3 deepseek_r1_distill mimo interns1".split()),
    calls=CALLS,
)
"""Also for models that no other parser detects. Unmarked text is the answer if no closer comes."""


def think(
    name: str, aliases: str = "", *, mark: str = "", also: str = "", rank: int = 1, **fields: Any
) -> ReasoningParser:
    """A copy of `QWEN3` for chat templates with `mark`, and `also` in any letter case; without
    `mark`, for none. The highest `rank` that detects wins. `fields`: of `ReasoningParser`."""

    def detect(template: str) -> bool:
        return bool(mark) and mark in template and also in template.lower()

    own: dict[str, Any] = {"aliases": tuple(aliases.split()), "detect": detect, "rank": rank}
    return replace(QWEN3, name=name, **own | fields)


def pair(name: str, start: str, end: str, rank: int = 2, **fields: Any) -> ReasoningParser:
    """A parser of thoughts between two markers that no other family has."""
    return ReasoningParser(name, start, end, detect=lambda text: start in text, rank=rank, **fields)


ALWAYS: dict[str, Any] = {"unmarked": "reasoning"}
"""For models that always think first: their template writes the opener, or they may omit it."""
HY_V3_CALLS = (*CALLS, ("<tool_calls", ""), ("<tool_call:opensource>", ""))
HY_V3 = think("hy_v3", "hunyuan", mark="<tool_sep", also="<think", rank=2, calls=HY_V3_CALLS,
              starts=("<think:opensource>",), ends=("</think:opensource>",))  # fmt: skip
HY_V3_OPEN = think("hy_v3_opensource", rank=3, calls=HY_V3_CALLS,
                   detect=lambda text: HY_V3.detect(text) and ":opensource" in text,
                   start=HY_V3.starts[0], end=HY_V3.ends[0],
                   starts=(HY_V3.start,), ends=(HY_V3.end,))  # fmt: skip
"""Some published weights write `:opensource` into every marker. With it in `start` and `end`, a
grammar and the prompt use the markers that are single tokens of these weights."""
R1 = "deepseek_r1_0528 qwen3_thinking nemotron_nano vibethinker holo2"  # aliases
V3 = "deepseek_v31 deepseek_v32"  # aliases
V3_CALLS = (DSML, ("<｜tool▁calls▁begin｜>", ""))
M2_CALLS = (CALL, ("<tool_call>", ""), ("<invoke name=", ""))
RESPONSE = ("<response>", "</response>")  # markers around the answer, which are not shown
PARSERS = (
    QWEN3,
    think("deepseek_r1", R1, mark="<｜Assistant｜><think>", **ALWAYS),
    think("deepseek_v3", V3, mark="<｜Assistant｜>", also="thinking", rank=2, calls=V3_CALLS),
    think("deepseek_v4", mark="｜DSML｜tool_calls", rank=3, calls=(DSML,),
          unmarked_call="reasoning"),
    think("glm4", "glm glm4_moe glm45 glm46 glm47 poolside_v1", mark="<arg_key>", also="think"),
    think("minimax_m2", "minimax", mark="<minimax:tool_call>", calls=M2_CALLS, **ALWAYS),
    ReasoningParser("minimax_m2_append", start="", end="", prefix="<think>", unmarked="content",
                    aliases=("minimax_append_think", "minimax_m2_append_think")),
    think("granite_thinking", "granite4", mark="<think>", also="granite"),
    think("step3p5", "step3 step", rank=0, **ALWAYS),
    think("ernie45", "ernie", mark="</think>", also="<response>", hidden=RESPONSE, **ALWAYS),
    think("kimi_k2", "kimi", mark="<|im_middle|>", also="<think>", starts=("◁think▷",),
          ends=("◁/think▷",), calls=(("<|tool_calls_section_begin|>", ""),)),
    HY_V3,
    HY_V3_OPEN,
    think("hunyuan_a13b", mark="<answer>", also="<think>", hidden=("<answer>", "</answer>")),
    think("nemotron_v3", "nemotron nemotron_3 nano_v3 super_v3", mark="<think>", also="nemotron"),
    pair("seed_oss", "<seed:think>", "</seed:think>", rank=1, calls=(("<seed:tool_call>", ""),)),
    pair("mistral", "[THINK]", "[/THINK]", rank=1, calls=(("[TOOL_CALLS]", ""),),
         aliases=("magistral",)),
    pair("gemma4", "<|channel>", "<channel|>", header="thought", calls=(("<|tool_call>", ""),)),
    pair("granite", "Here is my thought process:", "Here is my response:",
         starts=("Here's my thought process:",), ends=("Here's my response:",),
         calls=(("<|tool_call|>", ""), ("<tool_call>", ""))),
    pair("north", "<|START_THINKING|>", "<|END_THINKING|>", calls=(("<|START_ACTION|>", ""),),
         ends=("<|START_TEXT|>", "<|START_RESPONSE|>"), hidden=("<|END_TEXT|>", "<|END_RESPONSE|>"),
         aliases=("cohere", "command_a", "cohere_command3", "cohere_command4"), **ALWAYS),
)  # fmt: skip


@hookimpl
def mlx_reasoning_parsers() -> Iterable[ReasoningParser]:
    yield from PARSERS
