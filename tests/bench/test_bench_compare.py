"""What the comparison says of servers that are wrong, slow, silent or gone."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from command_line import running
from command_line.commands import benchmarks
from compare import run, stall
from compare.formats import write_format
from compare.markdown import NOWHERE, report
from compare.others import Other, key_of, model_of, parse_other
from compare.plan import FAMILIES, PARTS, Plan, Subject, refuse_too_large
from compare.result import Result, merged, read, save
from compare.rows import Row
from compare.sides import NATIVE, Side
from compare.verdict import not_faster, ratios, without_rival
from mlx_provider.commands import load_model
from mlx_provider.errors import BadRequest, EngineUnavailable
from mlx_provider.families.checkpoint import read_json
from peers import chat_pieces, chat_request, questions
from servers import Answer, Client, Kept, Kind


def test_streams_that_end_too_soon_are_told() -> None:
    def told(ended: float) -> dict[str, str]:
        stream = Answer("a b", 0.1, ended, 2, 0, times=(0.1, ended))
        newcomer = Answer("c", 0.5, 0.6, 1, 0)
        found = Row("stall", "llama", "4bit", "case", "server")
        stall.add_row(found, stall.Scene([stream], newcomer, came=0.2))
        assert found.figures["longest_gap"] == [pytest.approx(ended - 0.1)]
        return found.notes

    assert told(ended=0.6) == {"streams": stall.TOO_SHORT}
    assert told(ended=0.8) == {}


SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Well(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Well).serve_forever()
"""


def test_a_server_that_died_is_told_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "well_server.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    kept = Kept(
        Kind("well", ("-m", "well_server"), chat_request, chat_pieces), tmp_path, tmp_path / "log"
    )
    try:
        side = Side("well", Client(kept.start()), kept=kept)
        side.ready()
        assert side.deaths == []
        kept.stop()
        side.ready()
        assert side.deaths == ["its process ended with signal 15"]
        assert kept.death == ""
        side.client.close()
        (tmp_path / "well_server.py").write_text("raise SystemExit('no room here')")
        kept.stop()
        side.revive()
        side.revive()
        assert side.deaths[2].endswith("no room here")
        assert len(side.deaths) == 3
    finally:
        kept.stop()


def row(server: str, *rates: float | None, metric: str = "throughput", **more: Any) -> Row:
    return Row("speed", "llama", "4bit", "16 streams", server, figures={metric: [*rates]}, **more)


RUN = {
    "command": "python tests/benchmarks compare",
    "started": "2026-01-01T00:00:00+00:00",
    "seconds": 9,
    "machine": {
        "processor": "M9", "cores": 2, "memory_gb": 8, "system": "x", "device": "d",
        "load_average": 0.5,
    },
    "versions": {"mlx": "1"},
    "servers": {},
}  # fmt: skip


def result(*rows: Row) -> Result:
    return Result([RUN], list(rows))


def test_ratios_are_of_the_same_round_and_above_one_in_our_favour() -> None:
    rows = [row("mlx-provider", 100, 300, 200), row("other", 200, 100, 50), row(NATIVE, 1, 1, 1)]
    (rate,) = ratios(rows)
    assert rate.rounds == (0.5, 3, 4)
    assert (rate.value, rate.unsure) == (3, True)
    times = [row("mlx-provider", 1, None, metric="first_token"), row("other", 4, 1)]
    times[1].figures = {"first_token": [4, 1]}
    (first,) = ratios(times)
    assert first.rounds == (4,)


def test_where_we_are_not_faster_is_said_worst_first() -> None:
    rows = [row("mlx-provider", 90, 110), row("a", 100, 100), row("b", 180, 220), row("c", 50, 50)]
    assert [(r.other.server, r.value) for r in not_faster(rows)] == [("b", 0.5), ("a", 1.0)]
    told = report(result(*rows))
    assert "throughput **0.50 ×** b's (100 against 200 tokens/s; rounds 0.50 to 0.50)" in told
    assert "throughput **1.00 ×** a's (100 against 100 tokens/s; rounds 0.90 to 1.10, which" in told
    assert "3 figures were compared; 2 are listed." in told
    wrong = Row("answers", "llama", "4bit", "4 at once", "b", compared=4, equal=3)
    assert "0.50 to 0.50); its answers in company are not those alone" in report(
        result(*rows, wrong)
    )


def test_the_section_is_never_left_out() -> None:
    faster = report(result(row("mlx-provider", 200), row("other", 100)))
    assert f"## Where we are not faster\n\n{NOWHERE}\n" in faster
    alone = report(result(row("mlx-provider", 200)))
    assert "There was no other server's figure to compare with." in alone


def test_a_server_that_refused_is_no_rival_and_that_is_said() -> None:
    rows = [row("mlx-provider", 100), row("other", 900, asked=16, refused=3, reason="HTTP\n500")]
    assert list(ratios(rows)) == []
    assert without_rival(rows) == rows[:1]
    assert "refused 3 of 16: HTTP 500" in report(result(*rows))
    missing = report(result(row("mlx-provider", None), row("other", 900)))
    assert "- llama, 4bit, 16 streams: throughput: no figure of ours" in missing
    ours = row("mlx-provider", None, asked=4, refused=1, reason="no room")
    told = report(result(ours, row("other", 900)))
    assert "## Where we are not faster\n\n- llama, 4bit, 16 streams: refused 1 of 4: no" in told


def test_runs_become_one_report_and_keep_their_ratios(tmp_path: Path) -> None:
    ours, other = row("mlx-provider", 100), row("other", 50)
    save(result(ours), tmp_path / "a")
    save(result(other), tmp_path / "b")
    whole = merged([read(tmp_path / "a"), read(tmp_path / "b" / "result.json")])
    assert [each.run for each in whole.rows] == [0, 1]
    assert list(ratios(whole.rows)) == []
    assert report(whole).count("python tests/benchmarks compare") == 2
    (tmp_path / "c").write_text("{}")
    with pytest.raises(BadRequest, match="c is no result of `compare`"):
        read(tmp_path / "c")


def test_the_command_repeats_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    def measure(plan: Plan, out: Path | None) -> Result:
        asked.append(plan)
        return result()

    monkeypatch.setattr(running, "preload", lambda: None)
    monkeypatch.setattr(run, "bench", measure)
    other = parse_other("vllm=http://127.0.0.1:8000,a b")
    plans = [
        Plan(rounds=7, limit=9.5, streams=[1, 3], parts=["stall"], native=False, peers=[]),
        Plan(models=["org/name"], others=[other], crowd=3, edge=56, prompt=33),
    ]
    for plan in plans:
        words = shlex.split(plan.command())
        assert words[:3] == ["python", "tests/benchmarks", "compare"]
        done = CliRunner().invoke(benchmarks, words[2:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert asked[-1].command() == plan.command()
        assert (asked[-1].others, asked[-1].limit) == (list(plan.others), plan.limit)


def test_servers_are_named_without_their_keys() -> None:
    other = parse_other("my-vllm=http://host:8000")
    assert (other.base, other.model) == ("http://host:8000/v1", "")
    assert key_of(other, {"MY_VLLM_API_KEY": "secret"}) == "secret"
    assert parse_other("a=https://host/api/,some/name,x").base == "https://host/api"
    assert parse_other("a=https://host/api/,some/name").model == "some/name"
    wrong = {
        "http://host": "no NAME=URL", "a=ftp://host": "no NAME=URL", "a=host:1": "no NAME=URL",
        "a=http://me:key@host": "A_API_KEY", "a=http://host?key=1": "A_API_KEY",
        "mlx-provider=http://host": "our own name",
    }  # fmt: skip
    for text, told in wrong.items():
        with pytest.raises(BadRequest, match=told):
            parse_other(text)
    with pytest.raises(EngineUnavailable, match="/v1/models: "):
        model_of(Other("gone", "http://127.0.0.1:9/v1"))


def test_plans_that_cannot_be_are_told() -> None:
    for plan, told in (
        (Plan(formats=("8bit",)), "no such format: 8bit"),
        (Plan(families=("nobody",)), "unknown tiny family 'nobody'"),
        (Plan(models=["demo"], others=[Other("mlx_lm.server", "http://host/v1")]), "two servers"),
    ):
        with pytest.raises(BadRequest, match=told):
            plan.check()
    with pytest.raises(BadRequest, match="--server needs one --model"):
        Plan(others=[Other("a", "http://host/v1")]).check()


def test_more_copies_than_memory_are_told_before_they_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    subject = Subject("a", "b", tmp_path, sees=False)
    refuse_too_large(Plan(), subject, 3000)
    refuse_too_large(Plan(peers=["mlx-lm"]), subject, 2000)
    with pytest.raises(BadRequest, match=r"3 servers with .* leave some out with --peer"):
        refuse_too_large(Plan(), subject, 2999)


@pytest.mark.parametrize("family", FAMILIES)
def test_four_bits_are_what_is_served(tmp_path: Path, family: str) -> None:
    folder = write_format(tmp_path / "model", family, "4bit", 64, 2)
    assert read_json(folder / "config.json")["quantization"] == {"group_size": 64, "bits": 4}
    model: Any = load_model(folder, None)
    kinds = {type(layer).__name__ for _, layer in model.model.named_modules()}
    assert "QuantizedLinear" in kinds


def test_no_question_is_asked_twice_and_every_side_gets_the_same() -> None:
    asked = [q for turn in range(3) for n in (1, 4, 16) for q in questions("speed", n, turn, 40)]
    texts = [messages[0]["content"] for messages in asked]
    assert len(set(texts)) == len(texts) == 3 * (1 + 4 + 16)
    assert questions("speed", 4, 1, 40) == questions("speed", 4, 1, 40)


@pytest.mark.sweep
def test_every_part_beside_the_peers(
    benchmark: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    few = "--rounds 1 --crowd 4 --streams 2 --words 8 --reply 16 --prompt 200 --edge 112"
    model = "--family qwen3_vl --format bfloat16 --hidden 64 --layers 2"
    found = benchmark("compare", *few.split(), *model.split(), f"--out={tmp_path}")
    assert found["absent"] == found["deaths"] == []
    names = ["mlx-provider", NATIVE, "mlx_lm.server", "mlx_vlm.server"]
    for part in PARTS:
        rows = [row for row in found["rows"] if row["part"] == part]
        assert list(dict.fromkeys(row["server"] for row in rows)) == names
        ours = [row for row in rows if row["server"].startswith("mlx-provider")]
        assert all(row["refused"] == 0 and row["equal"] == row["compared"] for row in ours)
    images = [row for row in found["rows"] if row["case"] == "image, once more"]
    assert [row["server"] for row in images] == [*names[:2], names[3]]
    assert "figures were compared" in (tmp_path / "report.md").read_text()
