"""Two checkouts compared: whose code runs, and what is said of their figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from checkouts import believed, compare, compared, environment, figures
from developer_commands import benchmarks
from mlx_provider.errors import BadRequest, RequestFailed

CODE = """
import json, sys
from importlib.metadata import entry_points

def main():
    names = sorted(point.name for point in entry_points(group="mlx_provider"))
    asked = sys.argv[1:]
    print("a line before the last")
    print(json.dumps({"restarts": [{"layers": f"{names} {asked}", "share": 1e6}]}))
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Another state of the project, with one plugin and one benchmark."""
    folder = tmp_path / "other"
    (folder / "mlx_provider").mkdir(parents=True)
    (folder / "mlx_provider" / "__init__.py").touch()
    (folder / "mlx_provider" / "cli.py").write_text(CODE)
    points = '[project.entry-points.mlx_provider]\nbefore = "mlx_provider_before"\n'
    (folder / "pyproject.toml").write_text(points)
    return folder


def test_each_compared_checkout_runs_its_own_code_and_plugins(checkout: Path) -> None:
    asked = ["restart"]
    done = CliRunner().invoke(benchmarks, ["checkouts", "--rounds", "1", str(checkout), *asked])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == asked
    layers, share = result["figures"]
    assert share["there"] == 1e6
    assert 0 < share["here"] < 1e5
    assert share["ratio"] == share["lowest"] == share["highest"] == share["here"] / 1e6
    assert layers == {
        "figure": "restarts.0.layers",
        "here": "kv",
        "there": f"['before'] {['bench', *asked]}",
    }


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="is no checkout of mlx-provider"):
        environment(tmp_path, tmp_path)


def test_a_failed_benchmark_is_an_error_with_its_output(checkout: Path) -> None:
    with pytest.raises(RequestFailed, match=r"(?s)engine --part nothing failed:.*Invalid value"):
        compare(checkout, ["engine", "--part", "nothing"], rounds=1)


def test_compared_figures_are_the_measured_rates_and_token_counts() -> None:
    def run(rate: float, peer: float, tokens: str = "4/4", layout: str = "grouped") -> dict:
        rates = {f"mlx-provider ({layout})": rate, "mlx-lm BatchGenerator": peer}
        return dict(figures({"decode": {"rates": rates, "same": tokens, "target": 1.3}, "n": 7}))

    here = [run(20.0, 10.0), run(33.0, 9.0), run(10.0, 10.0)]
    there = [run(10.0, 10.0, "3/4", "solo"), run(11.0, 12.0), run(10.0, 5.0)]
    rows = compared(here, there)
    ours, peer, same = rows
    assert ours["figure"] == "decode.rates.mlx-provider"
    assert (ours["here"], ours["there"]) == (20.0, 10.0)
    assert (ours["lowest"], ours["ratio"], ours["highest"]) == (1.0, 2.0, 3.0)
    assert peer["figure"] == "decode.rates.mlx-lm BatchGenerator"
    assert (same["here"], same["there"]) == ("4/4", "3/4, 4/4")
    (noise,) = believed(rows)
    assert noise["figure"].startswith("decode: ")
    assert (noise["lowest"], noise["ratio"], noise["highest"]) == (0.75, 1.0, 2.0)
