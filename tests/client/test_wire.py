"""Bytes into events, errors and states."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_provider.client.messages import Address, LineBuffer, error_of, parse_address, parse_health
from mlx_provider.errors import BadRequest, EngineUnavailable, Unauthorized
from mlx_provider.protocol.events import EVENT_BATCH, Delta


@given(st.lists(st.text(min_size=1), min_size=1), st.integers(1, 50))
def test_events_do_not_depend_on_how_the_bytes_are_cut(texts: list[str], size: int) -> None:
    whole = b"".join(EVENT_BATCH.dump_json([Delta(content=text)]) + b"\n" for text in texts)
    lines = LineBuffer()
    found = [
        line for at in range(0, len(whole), size) for line in lines.feed(whole[at : at + size])
    ]
    events = [event for line in found for event in EVENT_BATCH.validate_json(line)]
    assert events == [Delta(content=text) for text in texts]


def test_an_error_response_of_another_server_is_unavailable() -> None:
    assert isinstance(error_of(404, "/path", b"<html>"), EngineUnavailable)
    assert isinstance(error_of(500, "/path", b'{"error": "no"}'), EngineUnavailable)
    assert isinstance(error_of(401, "/path", b"[]"), Unauthorized)


@pytest.mark.parametrize("line", [b"", b"<html>", b"[]", b"{}", b'{"protocol": "x"}'])
def test_a_health_response_of_another_server_is_unavailable(line: bytes) -> None:
    with pytest.raises(EngineUnavailable, match="no engine of mlx-provider"):
        parse_health(line)


def test_another_protocol_version_is_refused_with_both_versions_and_the_remedy() -> None:
    line = json.dumps({"protocol": 7, "version": "9.9", "pid": 77, "unknown": 1}).encode()
    with pytest.raises(EngineUnavailable, match=r"9\.9 \(protocol 7\).*end engine process 77"):
        parse_health(line)


def test_an_api_base_is_parsed_to_an_address_or_refused() -> None:
    assert parse_address("unix:/run/x.sock") == Address("http://engine", "/run/x.sock")
    assert parse_address("unix:///run/x.sock") == Address("http://engine", "/run/x.sock")
    assert parse_address("http://mac.local:8080/") == Address("http://mac.local:8080")
    assert parse_address("https://[::1]:1/v1") == Address("https://[::1]:1")
    for wrong in ("", "mac.local:8080", "unix:relative", "ftp://x", "http://", "http://x:port"):
        with pytest.raises(BadRequest, match="api_base") as caught:
            parse_address(wrong)
        assert caught.value.param == "api_base"
