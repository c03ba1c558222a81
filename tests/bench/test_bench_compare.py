"""What the comparison says of servers that are slower, refuse, or do not start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare import OURS, PARTS, PEERS, Other, Plan, Row, compare, parse_other, questions, ratios
from mlx_provider.commands import load_model
from mlx_provider.errors import BadRequest, EngineUnavailable
from mlx_provider.families.checkpoint import read_json
from mlx_provider_bench.model_speed import Answer
from random_weights import write_model
from servers import started


def row(*rates: float | None, metric: str = "rate", **more: Any) -> Row:
    return Row({metric: [*rates]}, **more)


def test_a_ratio_is_of_the_same_round_and_above_one_in_our_favour() -> None:
    rates = {OURS: row(100, 300, 200), "other": row(200, 100, 50), "third": row(1, 1, 1)}
    assert list(ratios({"case": rates})) == [("case", "rate", 3)]
    times = {OURS: row(1, None, metric="first_token"), "other": row(4, 1, metric="first_token")}
    assert list(ratios({"case": times})) == [("case", "first_token", 4)]


def test_a_case_with_a_refused_request_has_no_ratio() -> None:
    refusing = row(900, asked=16, refused=3, reason="HTTP 500")
    assert list(ratios({"case": {OURS: row(100), "other": refusing}})) == []
    assert list(ratios({"case": {OURS: refusing, "other": row(100)}})) == []
    assert refusing.report()["refused"] == "3/16"


def test_a_round_with_a_refused_request_has_no_figure() -> None:
    whole, failed = Answer(0.5, 1.0, 4, 9), Answer(0.1, 0.1, 0, 0, failure="no room")
    found = Row()
    found.count([whole, failed], first_token=0.3)
    found.count([whole, whole], first_token=0.5)
    assert found.figures == {"first_token": [None, 0.5]}
    assert (found.asked, found.refused, found.reason) == (4, 1, "no room")
    found.hold([whole, failed], [Answer(0, 1, 4, 9, text="other"), whole])
    assert (found.compared, found.equal) == (1, 0)


def test_a_server_that_does_not_start_is_reported_with_its_last_log_line(tmp_path: Path) -> None:
    command = ["-c", "raise SystemExit('no room here')"]
    with (
        pytest.raises(EngineUnavailable, match="well does not come up: no room here"),
        started("well", command, tmp_path, {}, tmp_path / "log"),
    ):
        pass


def test_a_server_is_given_as_name_url_model_and_never_with_a_key() -> None:
    assert parse_other("my-vllm=http://host:8000,a b") == Other(
        "my-vllm", "http://host:8000/v1", "a b"
    )
    assert parse_other("my-vllm=http://host:8000,a").variable == "MY_VLLM_API_KEY"
    assert parse_other("a=https://host/api/,some/name,x").base == "https://host/api"
    wrong = {
        "http://host": "no NAME=URL", "a=ftp://host,m": "no NAME=URL", "a=http://h": "no NAME=URL",
        "a=http://me:key@host,m": "A_API_KEY", "a=http://host?key=1,m": "A_API_KEY",
        "mlx-provider=http://host,m": "another name",
    }  # fmt: skip
    for text, message in wrong.items():
        with pytest.raises(BadRequest, match=message):
            parse_other(text)


def test_a_wrong_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="--server needs --model"):
        compare(Plan(["speed"], others=[Other("a", "http://host/v1", "m")]), print)
    with pytest.raises(BadRequest, match="no such format: 8bit"):
        write_model(tmp_path, "llama", "8bit", 64, 2)
    with pytest.raises(BadRequest, match="unknown tiny family 'nobody'"):
        write_model(tmp_path, "nobody", "4bit", 64, 2)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_four_bit_model_for_compare_has_quantised_layers(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "model", family, "4bit", 64, 2)
    assert read_json(folder / "config.json")["quantization"] == {"group_size": 64, "bits": 4}
    model: Any = load_model(folder, None)
    kinds = {type(layer).__name__ for _, layer in model.model.named_modules()}
    assert "QuantizedLinear" in kinds


def test_questions_never_repeat_and_are_equal_for_every_server() -> None:
    asked = [q for turn in range(3) for n in (1, 4, 16) for q in questions("speed", n, turn, 40)]
    texts = [messages[0]["content"] for messages in asked]
    assert len(set(texts)) == len(texts) == 3 * (1 + 4 + 16)
    assert questions("speed", 4, 1, 40) == questions("speed", 4, 1, 40)


@pytest.mark.sweep
def test_compare_measures_engine_and_peers(benchmark: Callable[..., dict[str, Any]]) -> None:
    few = "--rounds 1 --crowd 4 --streams 2 --words 8 --reply 16 --prompt 200"
    model = "--family llama --format bfloat16 --hidden 64 --layers 2"
    found = benchmark("compare", *few.split(), *model.split())
    assert found["absent"] == {}
    for part in PARTS:
        for servers in found[part].values():
            assert list(servers) == [OURS, *PEERS]
            assert servers[OURS]["refused"].startswith("0/")
    assert found["speed"]["streams: 2"][OURS]["rate_to_best"] > 0
    assert found["answers"]["4 at once"][OURS]["as_alone"] == "4/4"


@pytest.mark.sweep
def test_bench_engine_measures_stalls_of_both(benchmark: Callable[..., dict[str, Any]]) -> None:
    found = benchmark("engine", "--part", "stall", "--hidden", "64", "--layers", "2")
    assert len(found["stall"]) == 3
    assert all(each["worst_gap"] >= each["median_gap"] for each in found["stall"].values())
