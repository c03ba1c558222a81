"""One benchmark of this code and of another checkout's, in turn.

Each side runs in processes of its own, with its own benchmark over the same seeds. The sides take
turns (here, there; there, here; ...), since a machine drifts: what counts is the ratio within
each pair of runs. What mlx-lm and mlx-vlm did in the same runs is no different code on either
side: how far their ratios are from 1 says how far ours are to be believed.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import typer
from typer.main import get_group

from mlx_provider.errors import BadRequest, RequestFailed
from mlx_provider_bench import commands
from mlx_provider_bench.report import Result, print_rows
from servers import stop

OURS = "mlx-provider"
PEERS = ("mlx-lm", "mlx_lm", "mlx_vlm")
"""How the names of what is the same on both sides begin."""
END_LIMIT = 60.0
"""Seconds for a benchmark to end the servers that it has started."""
HERE = Path(__file__).parents[2]
RUN = "from mlx_provider.cli import main; main()"


def compare(other: Path, benchmark: Sequence[str], rounds: int) -> Result:
    """Run `benchmark` (its name and options) on both sides; JSON-able. A table goes to stderr.

    Raises `BadRequest` where `other` is no checkout, `RequestFailed` where a benchmark fails.
    """
    here: list[Result] = []
    there: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        variables = environment(other, Path(scratch))
        sides = [("here", HERE, {}, here), ("there", other, variables, there)]
        for turn in range(rounds):
            for name, checkout, own, runs in sides[:: -1 if turn % 2 else 1]:
                typer.echo(f"round {turn + 1} of {rounds}: {name}", err=True)
                runs.append(dict(figures(result_of(checkout, benchmark, own))))
    rows = compared(here, there)
    ours = [row for row in rows if not is_peers(row["figure"])]
    print_rows(f"{' '.join(benchmark)}; there: {other}", _TABLE, ours + believed(rows))
    return {"benchmark": list(benchmark), "there": str(other), "rounds": rounds, "figures": rows}


def environment(checkout: Path, scratch: Path) -> dict[str, str]:
    """Variables with which Python takes the code of `checkout` and the plugins that it declares.

    Of distributions of one name importlib.metadata takes the first on the path: that is one made
    in `scratch` from the checkout's `pyproject.toml`. Raises `BadRequest`.
    """
    try:
        text = (checkout / "pyproject.toml").read_text(encoding="utf-8")
        plugins = tomllib.loads(text)["project"]["entry-points"]["mlx_provider"]
    except (OSError, ValueError, KeyError):
        raise BadRequest(f"{checkout} is no checkout of mlx-provider", param="other") from None
    info = scratch / "mlx_provider-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-provider\nVersion: 0\n")
    points = "".join(f"{name} = {module}\n" for name, module in plugins.items())
    (info / "entry_points.txt").write_text(f"[mlx_provider]\n{points}")
    checkout = checkout.resolve()
    path = [str(scratch), str(checkout), str(checkout / "plugins")]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(path)}


def command_of(checkout: Path, name: str) -> list[str]:
    """The beginning of a command of `mlx-provider bench` or of `tests/benchmarks`.

    In older checkouts, which have no such folder, all benchmarks are commands of the first.
    """
    own = checkout.resolve() / "tests" / "benchmarks"
    if name in get_group(commands.bench).commands or not (own / "__main__.py").exists():
        return [sys.executable, "-c", RUN, "bench"]
    return [sys.executable, str(own)]


def result_of(checkout: Path, benchmark: Sequence[str], variables: Mapping[str, str]) -> Result:
    """The JSON line of a benchmark. Raises `RequestFailed`."""
    process = subprocess.Popen(
        [*command_of(checkout, benchmark[0]), *benchmark],
        env=os.environ | {"PYTHONSAFEPATH": "1"} | dict(variables),  # no code of this folder
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the benchmark
    )
    try:
        out, told = process.communicate()
    finally:
        stop(process, END_LIMIT)
    if process.returncode != 0:
        raise RequestFailed(f"{' '.join(benchmark)} failed:\n{told.strip()[-1500:]}")
    result: Result = json.loads(out.splitlines()[-1])
    return result


def figures(value: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every number and text of a result by its path; of our name without the KV layout."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from figures(inner, *path, OURS if key.startswith(f"{OURS} (") else key)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from figures(inner, *path, str(at))
    else:
        yield ".".join(path), value


def compared(here: Sequence[Result], there: Sequence[Result]) -> list[Result]:
    """What both sides report and is not the same in every run: ratios of what was measured."""
    both = [name for name in here[0] if all(name in run for run in (*here, *there))]
    sides = [(name, [run[name] for run in here], [run[name] for run in there]) for name in both]
    return [_row(name, ours, other) for name, ours, other in sides if len({*ours, *other}) > 1]


def _row(name: str, here: Sequence[Any], there: Sequence[Any]) -> Result:
    if not all(isinstance(value, float) for value in (*here, *there)):
        sides = {"here": here, "there": there}
        return {"figure": name} | {k: ", ".join(sorted(set(map(str, v)))) for k, v in sides.items()}
    ratios = [a / b for a, b in zip(here, there, strict=True) if b]
    return {"figure": name, "here": median(here), "there": median(there)} | _spread(ratios)


def _spread(ratios: Sequence[float]) -> Result:
    if not ratios:
        return {}
    return {"ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def is_peers(figure: str) -> bool:
    """Whether a figure was measured on code that is the same on both sides."""
    return any(part.startswith(PEERS) for part in figure.split("."))


def believed(rows: Sequence[Result]) -> list[Result]:
    """One row for each part of the benchmark: all ratios of its peers."""
    parts: dict[str, list[float]] = {}
    for row in rows:
        if is_peers(row["figure"]) and "ratio" in row:
            part = row["figure"].partition(".")[0]
            parts.setdefault(part, []).extend((row["ratio"], row["lowest"], row["highest"]))
    return [
        {"figure": f"{part}: what is the same on both sides"} | _spread(ratios)
        for part, ratios in parts.items()
    ]


_TABLE = {name: name for name in ("figure", "here", "there", "ratio", "lowest", "highest")}
