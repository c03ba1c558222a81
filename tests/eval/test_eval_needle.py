"""Prompts of a wanted length with one thing to be found, and what is made of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_provider_eval import needle_report
from mlx_provider_eval.haystack import HAYSTACKS, as_long_as
from mlx_provider_eval.needle import lengths


def words(messages: list[dict[str, Any]]) -> int:
    return sum(3 + len(each["content"].split()) for each in messages)


@pytest.mark.parametrize("kind", HAYSTACKS)
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_what_is_hidden_stands_once_at_its_depth(kind: str, depth: float) -> None:
    haystack = HAYSTACKS[kind]
    messages = haystack.build(40, depth, 1, 500)
    text = "\n".join(each["content"] for each in messages if each["role"] == "user")
    answer = haystack.answer(1)
    assert text.count(answer) == 1
    assert text.index(answer) / len(text) == pytest.approx(depth, abs=0.12)
    assert messages[-1]["role"] == "user"


@pytest.mark.parametrize("kind", HAYSTACKS)
def test_prompts_are_the_same_each_time_and_none_begins_as_another(kind: str) -> None:
    build = HAYSTACKS[kind].build
    assert build(60, 0.25, 3, 9) == build(60, 0.25, 3, 9)
    starts = {
        str(build(60, depth, 3, length))[:400] for length in (8, 9) for depth in (0.25, 0.5, 1)
    }
    assert len(starts) == 6


def test_seeds_hide_other_things() -> None:
    assert len({HAYSTACKS["document"].answer(seed) for seed in range(20)}) == 20
    assert len({HAYSTACKS["talk"].answer(seed) for seed in range(6)}) == 6


@pytest.mark.parametrize("kind", HAYSTACKS)
@pytest.mark.parametrize("tokens", [60, 300, 5000])
@pytest.mark.parametrize("near", [1, 40, 2000])
def test_a_prompt_is_as_long_as_it_may_be(kind: str, tokens: int, near: int) -> None:
    counted = []

    def count(messages: Any) -> int:
        counted.append(words(messages))
        return counted[-1]

    def build(parts: int) -> Any:
        return HAYSTACKS[kind].build(parts, 0.5, 0, tokens)

    messages, found, parts = as_long_as(build, count, tokens, near)
    assert words(messages) == found <= tokens
    assert found > tokens - 25
    assert messages == build(parts)
    assert len(counted) < 25


def test_no_room_for_any_part() -> None:
    messages, tokens, parts = as_long_as(lambda n: [{"content": "x " * (50 + n)}], words, 10)
    assert (parts, tokens) == (0, 53)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("least", "limit", "wanted"),
    [
        (1024, 8192, [1024, 2048, 4096, 8192]),
        (1024, 4031, [1024, 2048, 4031]),
        (1024, 2100, [1024, 2100]),
        (300, 300, [300]),
        (128, 250, [128, 250]),
    ],
)
def test_lengths_double_up_to_the_limit(least: int, limit: int, wanted: list[int]) -> None:
    assert lengths(least, limit) == wanted


def subject(label: str, found: dict[int, tuple[int, ...]], **more: Any) -> dict[str, Any]:
    cells = [
        {
            "length": length,
            "depth": 50 * at,
            "tokens": length - 1,
            "skipped": more.get("skipped", 0),
        }
        | {"asked": 3, "found": count, "failed": 0, "missed": []}
        for length, counts in found.items()
        for at, count in enumerate(counts)
    ]
    own = {"model": "m", "label": label, "options": more.get("options", {}), "haystack": "talk"}
    return own | {"limited_by": "the model's context", "cells": cells}


def result(*subjects: dict[str, Any]) -> dict[str, Any]:
    return {"subjects": [*subjects]}


WHOLE = subject("m", {512: (3, 3, 3), 1024: (3, 3, 3)})
WORSE = subject("m, kv_bits=4", {512: (3, 3, 3), 1024: (3, 1, 2)}, options={"kv_bits": 4})


def test_the_table_shows_found_by_length_and_depth() -> None:
    whole, worse = needle_report.tables(result(WHOLE, WORSE))
    assert whole.head == ["tokens", "0 %", "50 %", "100 %"]
    assert worse.rows[1] == ["1,023", "3/3", "1/3", "2/3"]


def test_what_sparse_prefill_computed_is_a_column() -> None:
    sparse = subject("m, s", {512: (3, 3, 3)}, options={"sparse_prefill": 0.5}, skipped=200)
    (table,) = needle_report.tables(result(sparse))
    assert (table.head[1], table.rows[0][1]) == ("computed", "311")


def test_guidance_says_what_was_measured() -> None:
    reach, misses, beside = needle_report.guidance(result(WHOLE, WORSE))
    assert "everything found up to 1,023 tokens, the longest that was asked" in reach
    assert "everything found up to 511 tokens; at 1,023 it misses at depth 50 %, 100 %" in misses
    assert "of 18 asked of both: 3 found no more, 0 found besides" in beside


def test_an_option_without_effect_is_told() -> None:
    idle = subject("m, s", {512: (3, 3, 3)}, options={"sparse_prefill": 0.5})
    told = needle_report.guidance(result(idle))
    assert "no prompt was thinned out" in told[1]
