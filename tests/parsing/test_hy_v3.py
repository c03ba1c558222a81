"""Hunyuan V3: published weights write `:opensource` into every marker."""

import pytest

from byte_model import byte_model
from mlx_provider.chat.constraints.compiler import Thoughts

from .conftest import REASONING_PARSERS, TOOL_PARSERS, read_chunks, tool, written

TOOLS = [tool("put", text="string")]
ARGUMENTS = {"text": "\na <b>\n"}
MARKS = {"hy_v3": "", "hy_v3_opensource": ":opensource"}


@pytest.mark.parametrize("parser", sorted(MARKS))
@pytest.mark.parametrize(("form", "suffix"), MARKS.items())
@pytest.mark.parametrize("opened", [True, None, False])
def test_both_marker_spellings_are_read(
    parser: str, form: str, suffix: str, opened: bool | None
) -> None:
    """Either parser reads both spellings."""
    call = written(TOOL_PARSERS[form], "put", ARGUMENTS)
    start = "" if opened else f"<think{suffix}>"
    text = f"{start}I will.</think{suffix}>Done.{call}<｜hy_eos{suffix}｜>"
    for chunks in ([text], list(text)):
        found = read_chunks(
            chunks,
            tool_parser=TOOL_PARSERS[parser],
            reasoning_parser=REASONING_PARSERS[parser],
            reasoning_open=opened,
            tools=TOOLS,
        )
        assert (found.reasoning, found.content) == ("I will.", "Done.")
        assert found.whole_calls == [("put", ARGUMENTS)]


@pytest.mark.parametrize("parser", sorted(MARKS))
def test_a_forced_call_uses_the_tokens_of_the_model(parser: str) -> None:
    suffix = MARKS[parser]
    names = ("think", "/think", "tool_calls", "tool_call", "tool_sep", "arg_key", "/arg_value")
    model = byte_model([f"<{name}{suffix}>" for name in names])
    tools, thoughts = TOOL_PARSERS[parser], REASONING_PARSERS[parser]
    request = model.request(tools=TOOLS, tool_choice="required")
    opening = Thoughts(thoughts.start, thoughts.closers(), opened=False)
    made = model.compiler.structure(request, tools.call_grammar(), opening)
    assert made is not None
    call = written(tools, "put", ARGUMENTS)
    assert call.startswith(f"<tool_calls{suffix}>\n<tool_call{suffix}>put<tool_sep{suffix}>")
    assert model.accepts(made.constraint.fork(), call)
    assert model.accepts(made.constraint.fork(), f"<think{suffix}>Well.</think{suffix}>{call}")
