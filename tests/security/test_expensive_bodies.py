"""Bodies that are costly to refuse or to prepare: what is done for one lets others go on."""

import asyncio
import gc
import json
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlx_provider.bounds import MAX_FIELDS
from mlx_provider.errors import BadRequest
from mlx_provider.families.tokenizer import control_tokens as sliced
from mlx_provider.protocol.requests import EmbedRequest, GenerateRequest
from mlx_provider.server.handover import Activity
from mlx_provider.server.incoming import AT_ONCE, Bodies, Incoming, engine_parser, parse_request

MANY = 100_000
UNKNOWN = {f"f{i}": 1 for i in range(MANY)}
BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown fields": ({"prompt": "x", **UNKNOWN}, "body: has more than 256 fields"),
    "unknown options": ({"prompt": "x", "options": UNKNOWN}, "options: has more than"),
    "unknown sampling": ({"prompt": "x", "sampling": UNKNOWN}, "sampling: has more than"),
    "texts for tokens": ({"prompt": ["a"] * MANY}, "prompt: "),
    "numbers for names": ({"prompt": "x", "ignored": [1] * MANY}, "ignored"),
    "names": ({"prompt": "x", "ignored": ["a"] * MANY}, "ignored: at most 256 entries"),
    "parts": ({"messages": [{"role": "user", "content": [{}] * 2 * MANY}]}, "more than 200000"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_with_100000_faults_reports_one_or_two_of_them(name):
    fields, told = BODIES[name]
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate({"model": "m", **fields})
    assert caught.value.error_count() <= 2  # of both kinds that a prompt may be
    with pytest.raises(BadRequest, match=told):
        parse_request(GenerateRequest, json.dumps({"model": "m", **fields}).encode())


def test_an_input_of_wrong_tokens_reports_at_most_two_errors():
    with pytest.raises(ValidationError) as caught:
        EmbedRequest.model_validate({"model": "m", "input": [["a"] * MANY]})
    assert caught.value.error_count() <= 2


def test_the_field_limit_is_above_the_number_of_known_fields():
    assert len(GenerateRequest.model_fields) < MAX_FIELDS


def test_a_body_that_is_no_json_is_refused_with_the_place():
    for body in (b"", b"{", b'{"model": "\xff"}', b"[" * 10_000, b'{"model": 01}'):
        with pytest.raises(BadRequest, match=r"body: Invalid JSON: .+ at line 1"):
            parse_request(GenerateRequest, body)
    assert gc.isenabled()


class Slow(GenerateRequest):
    """Is parsed once the event loop has turned."""

    @classmethod
    def model_validate(cls, given: Any, **options: Any) -> Any:
        turned = threading.Event()
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(300), "the event loop stands still while a body is parsed"
        return super().model_validate(given, **options)


loop: asyncio.AbstractEventLoop


async def test_a_large_body_is_parsed_outside_the_event_loop_thread():
    global loop  # noqa: PLW0603
    loop = asyncio.get_running_loop()
    body = json.dumps({"model": "m", "prompt": "x" * AT_ONCE}).encode()
    scope = {"type": "http", "headers": [(b"content-length", str(len(body)).encode())]}
    bodies = Bodies(2**20)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    incoming = Incoming(
        Activity(), bodies, sender_fields=lambda scope, salt: {}, admit=lambda scope: None
    )
    parsed, ticket = await incoming.read(scope, receive, engine_parser(Slow))
    assert len(parsed.requests[0].prompt) == AT_ONCE
    ticket.close()
    assert bodies.small.nbytes == 0


class Recorded:
    """A pattern that notes what it is asked to search."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern = pattern
        self.widest = 0

    def finditer(self, text: str, begin: int, end: int) -> Any:
        self.widest = max(self.widest, min(end, len(text)) - begin)
        return self.pattern.finditer(text, begin, end)


def test_a_long_text_is_searched_in_slices():
    pattern = Recorded(re.compile("<end>"))
    text = "x" * (10 * sliced.SLICE) + "<end>"
    assert [*sliced.match_starts(pattern, text, 5)] == [10 * sliced.SLICE]  # type: ignore[arg-type]
    assert pattern.widest == sliced.SLICE + 4


@given(st.text("<abc>", max_size=60), st.sampled_from(["<a>", "ab", "aa|aba", "<a><a>"]))
def test_a_search_in_slices_finds_the_matches_of_one_search(text: str, source: str):
    longest = max(map(len, source.split("|")))
    every = re.compile(f"(?={source})")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced, "SLICE", 7)
        starts = [match.start() for match in every.finditer(text)]
        assert [*sliced.match_starts(every, text, longest)] == starts
        found = next(sliced.match_starts(re.compile(source), text, longest), None)
        assert (found is not None) == (re.search(source, text) is not None)
