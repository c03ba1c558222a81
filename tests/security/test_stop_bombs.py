"""Stop strings of any size and number: bounded, linear, and the same as a plain search."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.bounds import MAX_STOP_LENGTH, MAX_STOPS
from mlx_provider.chat.output.reply import StopText
from mlx_provider.errors import BadRequest
from mlx_provider.litellm.call import Call, generate_requests
from mlx_provider.protocol.requests import GenerateRequest
from mlx_provider.records.reading import partial_at
from mlx_provider.server.incoming import parse_request

FEW = st.text(alphabet="ab\n", max_size=6)
STOPS = st.lists(FEW, max_size=4)
MESSAGES = [{"role": "user", "content": "x"}]


def expected(text: str, stops: list[str]) -> tuple[str, str]:
    """What is shown of a whole text and the stop string that ends it, character by character."""
    for end in range(1, len(text) + 1):
        found = [x for x in stops if x and text[:end].endswith(x)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def held(text: str, stops: list[str]) -> int:
    """How much of the end of a text may begin a stop string."""
    return max((n for x in stops for n in range(1, len(x)) if text.endswith(x[:n])), default=0)


@given(chunks=st.lists(FEW, max_size=8), stops=STOPS)
def test_chunked_stop_strings_act_as_a_plain_search(chunks: list[str], stops: list[str]) -> None:
    filtered, shown, fed = StopText(stops), "", ""
    for chunk in chunks:
        fed += chunk
        shown += filtered.push(chunk)
        text, matched = expected(fed, stops)
        assert filtered.matched == matched
        assert shown == (text if matched else fed[: len(fed) - held(fed, stops)])
        assert filtered.waiting == (0 if matched else held(fed, stops))
    assert shown + filtered.flush() == expected(fed, stops)[0]


@given(before=FEW, text=FEW, stops=STOPS)
def test_a_flush_separates_stop_strings(before: str, text: str, stops: list[str]) -> None:
    one, other = StopText(stops), StopText(stops)
    one.push(before)
    if not one.matched:
        one.flush()
        assert one.push(text) == other.push(text)
        assert one.matched == other.matched


@given(text=FEW, literals=STOPS, start=st.integers(0, 7))
def test_the_first_partial_marker_is_found(text: str, literals: list[str], start: int) -> None:
    begins = [
        at
        for at in range(start, len(text))
        if any(len(text) - at < len(x) and x.startswith(text[at:]) for x in literals)
    ]
    assert partial_at(text, literals, start) == min(begins, default=len(text))


def test_the_longest_stop_strings_take_little_memory() -> None:
    stops = ["a" * (MAX_STOP_LENGTH - i) + "z" for i in range(MAX_STOPS)]
    tracemalloc.start()
    filtered = StopText(stops)
    for _ in range(3):
        filtered.push("a" * MAX_STOP_LENGTH + "b")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_STOPS * MAX_STOP_LENGTH * 8


def test_a_long_marker_takes_little_memory() -> None:
    tracemalloc.start()
    assert partial_at("x" + "a" * 1000, ("a" * 20_000,)) == 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def translated(stop: Any) -> Any:
    call = {"model": "m", "messages": MESSAGES, "optional_params": {"stop": stop}}
    (made,) = generate_requests(Call({**call, "logging_obj": None}))
    return made.stop


def posted(stop: Any) -> Any:
    body = {"model": "m", "messages": MESSAGES, "stop": stop}
    return parse_request(GenerateRequest, json.dumps(body).encode()).stop


TOO_MUCH = [
    (["x" * 100_000], f"stop.0: at most {MAX_STOP_LENGTH} characters are possible, got 100000"),
    (["x"] * 5000, f"stop: at most {MAX_STOPS} entries are possible, got 5000"),
]


@pytest.mark.parametrize(("stop", "words"), TOO_MUCH)
def test_too_many_stop_strings_get_one_message_on_every_route(stop: list[str], words: str) -> None:
    for way in (translated, posted):
        with pytest.raises(BadRequest) as caught:
            way(stop)
        assert caught.value.message == words


def test_stop_strings_at_the_limits_are_accepted() -> None:
    most = ["x" * MAX_STOP_LENGTH] * MAX_STOPS
    assert translated(most) == posted(most) == most
