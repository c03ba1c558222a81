"""The group `bench`: when it is there, what it costs the others, and what it needs."""

import os
from pathlib import Path

from typer.main import get_group

from command_line import invoke
from mlx_provider_bench.commands import bench
from python_process import run_python

RUN = "from mlx_provider.cli import main; main()"


def test_without_plugins_there_is_no_bench_command() -> None:
    done = invoke("bench", "prefix")
    assert done.exit_code == 2
    assert "No such command 'bench'" in done.output


def test_the_help_of_bench_lists_every_command() -> None:
    done = invoke("bench", "--help", plugins="bench")
    assert done.exit_code == 0
    for name in get_group(bench).commands:
        assert f" {name} " in done.output


def test_bench_without_mlx_names_the_package_to_install(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "core.py").write_text("raise ImportError('no library here')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run_python(RUN, "bench", "prefix", status=1, env=os.environ | {"PYTHONPATH": path})
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: MLX cannot be imported (no library here): pip install ")
    assert done.stdout == ""
