"""`bench MODEL`: what it shows of a model, and of prompts that the model does not take."""

from collections.abc import Callable
from typing import Any

import pytest

from command_line import invoke
from mlx_provider_bench.model_speed import Answer, measure_row


def test_a_row_for_each_length_and_number_of_streams(
    bench: Callable[..., dict[str, Any]], mine: str
) -> None:
    lengths = ("--prompt", "300", "--prompt", "90000")
    result = bench(mine, "--streams", "1", "--streams", "2", *lengths, "--reply", "4")
    one, long, two, _ = result["rows"]
    assert [(each["streams"], each["prompt"]) for each in (long, two)] == [
        (1, 90_000),
        (2, two["prompt"]),
    ]
    assert 270 < one["prompt"] < 330
    for each in (one, two):
        assert each["first_token"] > 0
        # four tokens may all be drafts, which come at once: then there is no rate
        assert each["rate"] is None or each["rate"] >= each["pace"] > 0
    assert "prompt is too long" in long["failed"]
    told = result["told"]
    short, far = "300", "90,000"
    for number, streams, prompt in ((1, 1, short), (2, 1, far), (3, 2, short), (4, 2, far)):
        assert f"{number} of 4: streams: {streams}, prompts of {prompt} tokens" in told
    assert "1 of 4: first token, s: " in told
    assert "2 of 4: refused: " in told


def scripted(*answers: list[Answer]) -> Callable[[Any, int], list[Answer]]:
    """One answer for prompts that the engine has not seen, and another for the others."""
    left = iter(answers)
    return lambda asked, reply: next(left)


def answer(first: float, total: float, tokens: int, failure: str = "") -> Answer:
    return Answer(first, total, tokens, 100, failure)


def test_the_decode_rate_counts_only_the_time_in_which_all_streams_decode() -> None:
    computed = [answer(1.0, 1.0, 1), answer(2.0, 2.0, 1)]
    decoded = [answer(0.5, 1.5, 11), answer(0.5, 1.0, 11)]
    found = measure_row(scripted(computed, decoded), [[], []], 100, 11)
    assert found == {
        "prompt": 100,
        "streams": 2,
        "first_token": 1.5,
        "prompt_rate": 100.0,
        "pace": 15.0,
        "rate": 30.0,
    }


def test_a_reply_in_one_piece_has_no_decode_rate() -> None:
    """A short one whose tokens were all drafted."""
    answers = [answer(1.0, 1.0, 1)], [answer(0.5, 0.5001, 3)]
    assert measure_row(scripted(*answers), [[]], 100, 16)["rate"] is None


def test_a_refused_stream_makes_its_table_row_fail() -> None:
    answers = [answer(1.0, 1.0, 1), answer(1.0, 1.0, 0, "no memory")]
    found = measure_row(scripted(answers), [[], []], 100, 11)
    assert found == {"prompt": 100, "streams": 2, "failed": "no memory"}


@pytest.mark.parametrize("name", ["nosuch", "MODEL"])
def test_bench_takes_a_name_that_is_no_command_as_a_model(name: str) -> None:
    done = invoke("bench", name, "--help", plugins="bench")
    assert done.exit_code == 0
    assert "Measure time to first token" in done.output
