"""Formats that put thoughts between `<think>` and `</think>`, or between other markers."""

from __future__ import annotations

from dataclasses import replace

from mlx_provider import ReasoningParser

GEMMA4 = ReasoningParser(
    name="gemma4",
    start="<|channel>",
    end="<channel|>",
    header="thought",
    detect=lambda template: "<|channel>" in template,
    calls=(("<|tool_call>", ""),),
    rank=2,
)
GRANITE = ReasoningParser(
    name="granite",
    start="Here is my thought process:",
    starts=("Here's my thought process:",),
    end="Here is my response:",
    ends=("Here's my response:",),
    detect=lambda template: "Here is my thought process:" in template,
    calls=(("<|tool_call|>", ""), ("<tool_call>", "")),
    rank=2,
)
NORTH = ReasoningParser(
    name="north",
    start="<|START_THINKING|>",
    end="<|END_THINKING|>",
    ends=("<|START_TEXT|>", "<|START_RESPONSE|>"),
    hidden=("<|END_TEXT|>", "<|END_RESPONSE|>"),
    unmarked="reasoning",
    detect=lambda template: "<|START_THINKING|>" in template,
    calls=(("<|START_ACTION|>", ""),),
    aliases=("cohere", "command_a", "cohere_command3", "cohere_command4"),
    rank=2,
)


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

ALWAYS = replace(QWEN3, unmarked="reasoning", detect=lambda template: False)
"""Models that always think first: their template writes the opener, or they may omit it."""


def _hy_v3(template: str) -> bool:
    return "<tool_sep" in template and "<think" in template


HY_V3 = replace(
    QWEN3,
    name="hy_v3",
    starts=("<think:opensource>",),
    ends=("</think:opensource>",),
    detect=_hy_v3,
    calls=(*CALLS, ("<tool_calls", ""), ("<tool_call:opensource>", "")),
    aliases=("hunyuan",),
    rank=2,
)
"""Some published weights write `:opensource` into every marker. With it in `start` and `end`, a
grammar and the prompt use the marker that is one token."""


PARSERS = (
    QWEN3,
    replace(
        ALWAYS,
        name="deepseek_r1",
        detect=lambda template: "<｜Assistant｜><think>" in template,
        rank=1,
        aliases=("deepseek_r1_0528", "qwen3_thinking", "nemotron_nano", "vibethinker", "holo2"),
    ),
    replace(
        QWEN3,
        name="deepseek_v3",
        detect=lambda template: "<｜Assistant｜>" in template and "thinking" in template,
        aliases=("deepseek_v31", "deepseek_v32"),
        calls=(DSML, ("<｜tool▁calls▁begin｜>", "")),
        rank=2,
    ),
    replace(
        QWEN3,
        name="deepseek_v4",
        detect=lambda template: "｜DSML｜tool_calls" in template,
        calls=(DSML,),
        unmarked_call="reasoning",
        aliases=(),
        rank=3,
    ),
    replace(
        QWEN3,
        name="glm4",
        detect=lambda template: "<arg_key>" in template and "think" in template,
        aliases=("glm", "glm4_moe", "glm45", "glm46", "glm47", "poolside_v1"),
        rank=1,
    ),
    replace(
        ALWAYS,
        name="minimax_m2",
        detect=lambda template: "<minimax:tool_call>" in template,
        calls=(CALL, ("<tool_call>", ""), ("<invoke name=", "")),
        aliases=("minimax",),
        rank=1,
    ),
    ReasoningParser(
        name="minimax_m2_append",
        start="",
        end="",
        prefix="<think>",
        unmarked="content",
        aliases=("minimax_append_think", "minimax_m2_append_think"),
    ),
    replace(
        QWEN3,
        name="granite_thinking",
        detect=lambda template: "granite" in template.lower() and "<think>" in template,
        aliases=("granite4",),
        rank=1,
    ),
    replace(ALWAYS, name="step3p5", aliases=("step3", "step")),
    replace(
        ALWAYS,
        name="ernie45",
        detect=lambda template: "</think>" in template and "<response>" in template,
        hidden=("<response>", "</response>"),
        aliases=("ernie",),
        rank=1,
    ),
    replace(
        QWEN3,
        name="kimi_k2",
        starts=("◁think▷",),
        ends=("◁/think▷",),
        detect=lambda template: "<|im_middle|>" in template and "<think>" in template,
        calls=(("<|tool_calls_section_begin|>", ""),),
        aliases=("kimi",),
        rank=1,
    ),
    HY_V3,
    replace(
        HY_V3,
        name="hy_v3_opensource",
        start=HY_V3.starts[0],
        end=HY_V3.ends[0],
        starts=(HY_V3.start,),
        ends=(HY_V3.end,),
        detect=lambda template: _hy_v3(template) and ":opensource" in template,
        aliases=(),
        rank=3,
    ),
    replace(
        QWEN3,
        name="hunyuan_a13b",
        detect=lambda template: "<answer>" in template and "<think>" in template,
        hidden=("<answer>", "</answer>"),
        aliases=(),
        rank=1,
    ),
    replace(
        QWEN3,
        name="nemotron_v3",
        detect=lambda template: "nemotron" in template.lower() and "<think>" in template,
        aliases=("nemotron", "nemotron_3", "nano_v3", "super_v3"),
        rank=1,
    ),
    replace(
        QWEN3,
        name="seed_oss",
        start="<seed:think>",
        end="</seed:think>",
        detect=lambda template: "<seed:think>" in template,
        calls=(("<seed:tool_call>", ""),),
        aliases=(),
        rank=1,
    ),
    replace(
        QWEN3,
        name="mistral",
        start="[THINK]",
        end="[/THINK]",
        detect=lambda template: "[THINK]" in template,
        calls=(("[TOOL_CALLS]", ""),),
        aliases=("magistral",),
        rank=1,
    ),
    GEMMA4,
    GRANITE,
    NORTH,
)
