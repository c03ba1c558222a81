"""Prompts of a wanted length with one thing to be found, and what is made of the answers."""

from typing import Any

import pytest

from mlx_provider_eval.needle import Needles, document, lengths, locker, longest_prompt


def words(messages: list[dict[str, Any]]) -> int:
    return sum(3 + len(each["content"].split()) for each in messages)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_stands_once_at_its_depth(depth: float) -> None:
    (message,) = document(depth, 1, 500, 40)
    text, answer = message["content"], locker(1)[1]
    assert text.count(answer) == 1
    assert text.index(answer) / len(text) == pytest.approx(depth, abs=0.12)


def test_needle_prompts_are_reproducible_and_share_no_beginning() -> None:
    assert document(0.25, 3, 9, 60) == document(0.25, 3, 9, 60)
    starts = {
        str(document(depth, 3, length, 60))[:400] for length in (8, 9) for depth in (0.25, 0.5, 1)
    }
    assert len(starts) == 6
    assert len({locker(seed)[1] for seed in range(20)}) == 20


@pytest.mark.parametrize("tokens", [60, 300, 5000])
@pytest.mark.parametrize("near", [0, 1, 40, 2000])
def test_a_needle_prompt_is_nearly_as_long_as_the_limit(tokens: int, near: int) -> None:
    counted = []

    def count(messages: Any) -> int:
        counted.append(words(messages))
        return counted[-1]

    def build(parts: int) -> Any:
        return document(0.5, 0, tokens, parts)

    messages, found, parts = longest_prompt(build, count, tokens, near)
    assert words(messages) == found <= tokens
    assert found > tokens - 40
    assert messages == build(parts)
    assert len(counted) < 25


def test_a_limit_below_the_shortest_prompt_gives_the_prompt_without_parts() -> None:
    messages, tokens, parts = longest_prompt(lambda n: [{"content": "x " * (50 + n)}], words, 10)
    assert (parts, tokens) == (0, 53)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("least", "limit", "wanted"),
    [
        (1024, 8192, [1024, 2048, 4096, 8192]),
        (1024, 4031, [1024, 2048, 4031]),
        (300, 300, [300]),
        (128, 250, [128, 250]),
    ],
)
def test_needle_lengths_double_up_to_the_limit(least: int, limit: int, wanted: list[int]) -> None:
    assert lengths(least, limit) == wanted


def subject(label: str, found: dict[int, tuple[int, ...]], skipped: int = 0) -> dict[str, Any]:
    cells = [
        {"length": length, "depth": 25 * at, "tokens": length - 1, "skipped_tokens": skipped}
        | {"asked": 3, "found": count, "failed": 0, "missed": []}
        for length, counts in found.items()
        for at, count in enumerate(counts)
    ]
    return {"label": label, "limit": 1024, "limited_by": "the model's context", "cells": cells}


def test_the_needle_report_has_the_found_share_by_length_and_depth() -> None:
    whole = subject("m", {512: (3, 3, 3, 3, 3), 1024: (3, 3, 3, 3, 3)}, skipped=200)
    worse = subject("m, kv_bits=4", {512: (3, 3, 3, 3, 3), 1024: (3, 1, 2, 3, 3)})
    table = Needles().report([whole, worse])
    columns = {str(each.header): [str(cell) for cell in each.cells] for each in table.columns}
    assert columns["tokens"] == ["511", "1,023", "511", "1,023"]
    assert columns["computed"] == ["311", "823", "511", "1,023"]
    assert columns["25 %"] == ["3/3", "3/3", "3/3", "1/3"]
    first, second = str(table.caption).splitlines()
    limits = "(longest prompt 1,024, limited by the model's context)"
    assert first == f"m: everything found up to 1,023 tokens {limits}"
    assert second == f"m, kv_bits=4: everything found up to 511 tokens {limits}"
