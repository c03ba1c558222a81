"""The cursor that formats are read with."""

from collections.abc import Iterable

import pytest

from mlx_provider.records import NotACall, Reading, TextEnded, TextReader


def drive(reading: Reading[None], reader: TextReader, chunks: Iterable[str]) -> None:
    next(reading, None)
    for chunk in chunks:
        reader.feed(chunk)
        next(reading, None)
    reader.close()
    assert next(reading, "ended") == "ended"


@pytest.mark.parametrize(
    ("literals", "text", "expected"),
    [
        (("[", "[TOOL]"), "a[TOOL]b", ["a", "[TOOL]", "b"]),
        (("[", "[TOOL]"), "a[TOO b", ["a", "[", "TOO b"]),
        (("xyyz", "yy"), "axyyzb", ["a", "xyyz", "b"]),
        (("xyyz", "yy"), "axyyb", ["ax", "yy", "b"]),
        (("<a>",), "<<a>><", ["<", "<a>", "><"]),
        ((), "abc", ["abc"]),
    ],
)
def test_the_first_and_longest_literal(
    literals: tuple[str, ...], text: str, expected: list[str]
) -> None:
    for chunks in ([text], list(text)):
        reader, found = TextReader(), [""]

        def run(reader: TextReader = reader, found: list[str] = found) -> Reading[None]:
            def emit(piece: str) -> None:
                found[-1] += piece

            while literal := (yield from reader.pass_until(literals, emit)):
                found.extend([reader.skip(len(literal)), ""])

        drive(run(), reader, chunks)
        assert found == expected


def test_text_goes_on_as_soon_as_no_literal_can_begin_in_it() -> None:
    reader, found = TextReader(), list[str]()
    reading = reader.pass_until(("</end>",), found.append)
    next(reading)
    for chunk in ("so </e", "nough </en", "x"):
        reader.feed(chunk)
        next(reading)
    assert found == ["so ", "</enough ", "</enx"]


def test_going_back_to_a_mark() -> None:
    reader = TextReader()
    reader.feed("abc")
    reader.skip(1)
    mark = reader.mark()
    reader.skip(1)
    reader.feed("def")
    reader.skip(2)
    reader.rewind(mark)
    assert (reader.position, reader.ahead()) == (1, "bcdef")


def test_what_is_held_back_can_be_forgotten() -> None:
    reader = TextReader()
    reader.content("before")
    reader.hold()
    reader.call("f")
    assert [event.text for event in reader.take_events()] == ["before"]
    reader.let_go(keep=False)
    assert (reader.take_events(), reader.calls, reader.in_call) == ([], 0, False)
    reader.hold()
    reader.call("g")
    reader.let_go(keep=True)
    assert [event.text for event in reader.take_events()] == ["g"]


@pytest.mark.parametrize(("text", "error"), [("<tool", TextEnded), ("<toll", NotACall)])
def test_expecting_a_literal(text: str, error: type[Exception]) -> None:
    reader = TextReader()
    reader.feed(text)
    reader.close()
    with pytest.raises(error):
        next(reader.expect("<tool_call>"))
