"""Each call of a parallel turn reaches the client when its own text ends."""

import pytest

from mlx_provider.chat.output.reply import Reply
from mlx_provider.protocol.events import ToolCallDelta

from .conftest import REASONING_PARSERS, TOOL_PARSERS, tool

PARSERS = {parser.name: parser for parser in TOOL_PARSERS.values()}
NAMES = ("first", "second", "third")
ARGUMENTS = {"path": "a/b.py", "text": "word " * 20}
TOOLS = [tool(name, path="string", text="string") for name in NAMES]
AT_THE_END = {
    *("hy_v3", "hy_v3_opensource", "muse"),
    *("mistral", "mistral_ids"),
    *("llama4_pythonic", "lfm2", "olmo3", "minicpm5"),
}
"""These formats show a call when it is complete: a late fault makes it text, its id stands behind
it, or its arguments must be read as a whole."""


def _calls(name: str, count: int) -> str:
    """A turn with this many calls, without the text that closes the block."""
    grammar = PARSERS[name].call_grammar()
    closing = "" if grammar.between is None else grammar.close
    schema = TOOLS[0]["function"]["parameters"]
    written = [(each, ARGUMENTS, schema) for each in NAMES[:count]]
    return grammar.write_all(written).removesuffix(closing)


def _pieces(name: str, text: str) -> tuple[list[ToolCallDelta], int]:
    """The pieces of calls after `text`, which goes on, and the number of complete calls."""
    thoughts = REASONING_PARSERS.get(name)
    thoughts = thoughts if thoughts is not None and thoughts.whole else None
    reply = Reply(tools=TOOLS, tool_parser=PARSERS[name], reasoning_parser=thoughts)
    deltas = [delta for character in text for delta in reply.push_text(character)]
    return [piece for delta in deltas for piece in delta.tool_calls], reply.complete_calls


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_a_call_is_complete_before_the_next_one_is_named(name: str) -> None:
    """The tag that opens the next one may be needed to know that the last value has ended."""
    turn = _calls(name, 3)
    for count in (1, 2):
        pieces, whole = _pieces(name, turn[: turn.index(NAMES[count], len(_calls(name, count)))])
        assert [piece.name for piece in pieces if piece.name] == list(NAMES[:count])
        assert whole == count


@pytest.mark.parametrize("name", sorted(set(PARSERS) - AT_THE_END))
def test_the_name_comes_first_and_arguments_before_their_end(name: str) -> None:
    turn = _calls(name, 2)
    half = len(_calls(name, 1)) + turn[len(_calls(name, 1)) :].index("word " * 10)
    pieces, whole = _pieces(name, turn[: half + len("word " * 10)])
    of_second = [piece for piece in pieces if piece.index == 1]
    assert whole == 1
    assert of_second[0].name == "second"
    assert "word word" in "".join(piece.arguments for piece in of_second)
