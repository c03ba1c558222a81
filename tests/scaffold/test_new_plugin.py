"""`mlx-provider new-plugin`: folders that work as they are, and names that are refused."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import invoke
from mlx_provider.errors import BadRequest
from mlx_provider.registry import PluginRegistry
from mlx_provider.scaffold import KINDS
from python_process import run_python

Install = Callable[..., str]
PLUGINS = {option: f"own-{option}" for option in KINDS}
"""A plugin of each kind."""

TESTS = """
import os, sys
import pytest

for folder in sys.argv[1:]:
    os.chdir(folder)
    if pytest.main(["-q", "-p", "no:cacheprovider"]) != 0:
        sys.exit(f"tests of {folder} fail")
"""


def make(option: str, name: str, folder: Path) -> str:
    """What the command prints. Raises what it raises."""
    asked = ["new-plugin", name, f"--{option}", "--folder", str(folder)]
    return run(*asked)


def run(*arguments: str, registry: PluginRegistry | None = None) -> str:
    result = invoke(*arguments, plugins=registry)
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folder of a new plugin of each kind."""
    parent = tmp_path_factory.mktemp("plugins")
    for option, name in PLUGINS.items():
        make(option, name, parent)
    return [parent / f"mlx-provider-{name}" for name in PLUGINS.values()]


@pytest.fixture(scope="module")
def installed(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds them as pip would have left them."""
    site = tmp_path_factory.mktemp("site")
    for folder in folders:
        module = folder.name.replace("-", "_")
        info = site / f"{module}-0.1.0.dist-info"
        info.mkdir()
        head = f"Metadata-Version: 2.1\nName: {folder.name}\nVersion: 0.1.0\n"
        (info / "METADATA").write_text(head)
        name = module.removeprefix("mlx_provider_")
        (info / "entry_points.txt").write_text(f"[mlx_provider]\n{name} = {module}\n")
    paths = [str(site), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}


def test_tests_of_a_new_plugin_pass_at_once(folders: list[Path]) -> None:
    assert run_python(TESTS, *folders).stdout.count(" passed in ") == len(KINDS)


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check", "--line-length", "100"]])
def test_the_style_of_a_new_plugin_is_clean(folders: list[Path], arguments: list[str]) -> None:
    ruff = pytest.importorskip("ruff", reason="lint is an environment of its own")
    command = [ruff.find_ruff_bin(), *arguments, "--isolated", "--no-cache"]
    for folder in folders:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_plugin_loads_with_its_record(installed: dict[str, str]) -> None:
    code = "from mlx_provider.cli import main; main()"
    done = run_python(code, "plugins", "--json", env=installed)
    found = {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
    for kind in KINDS.values():
        name = PLUGINS[kind.option].replace("-", "_")
        assert found[name]["error"] is None
        assert found[name]["records"][kind.record] == [name]


def test_new_plugin_prints_the_next_steps_in_order(tmp_path: Path) -> None:
    said = make("family", "mlx_provider_Two-words".lower(), tmp_path)
    assert str(tmp_path / "mlx-provider-two-words/mlx_provider_two_words/model.py") in said
    steps = ("<clone>[testing]", "pytest ", "mlx-provider plugins", "--mlx-conformance two_")
    places = [said.index(step) for step in steps]
    assert places == sorted(places), "pytest is installed before it runs"


@pytest.mark.parametrize("name", ["", "9lives", "Own", "a b", "a--b", "../up", "é", "x" * 41, "a_"])
def test_an_invalid_plugin_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="cannot name a plugin: take small letters"):
        make("family", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "name", "told"),
    [
        ("family", "gemma3", r"'gemma3' is the name of an installed plugin, gemma3 \(mlx-provider"),
        ("family", "mlx-provider-qwen3-vl", "'qwen3_vl' is the name of an installed plugin"),
        ("tool-parser", "hermes", r"tool parser 'hermes' is installed already, by tool_parsers"),
        ("kernels", "c-p-u", "'c_p_u' is the name of an installed plugin, cpu"),
    ],
)
def test_an_installed_name_is_refused(tmp_path: Path, option: str, name: str, told: str) -> None:
    with pytest.raises(BadRequest, match=f"{told}.*: choose another"):
        make(option, name, tmp_path)


def test_the_name_of_a_broken_plugin_is_refused(tmp_path: Path, install_plugin: Install) -> None:
    install_plugin("mlx-provider-broken", "import nowhere", name="odd")
    with pytest.raises(BadRequest, match=r"'odd' is the name of an installed plugin, odd"):
        make("family", "odd", tmp_path)
    with pytest.raises(BadRequest, match=r"'broken' is the name of an installed plugin, odd"):
        make("family", "broken", tmp_path)


def test_new_plugin_overwrites_no_existing_folder(tmp_path: Path) -> None:
    make("drafter", "twice", tmp_path)
    own = tmp_path / "mlx-provider-twice" / "README.md"
    own.write_text("mine")
    with pytest.raises(BadRequest, match="is there already: choose another name, or move it"):
        make("drafter", "twice", tmp_path)
    assert own.read_text() == "mine"


def test_new_plugin_reports_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="cannot be made: Not a directory"):
        make("drafter", "other", tmp_path / "file")


def test_new_plugin_demands_exactly_one_kind(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="one of --family, --tool-parser, --reasoning-parser"):
        run("new-plugin", "none", "--folder", str(tmp_path))
    with pytest.raises(BadRequest, match="--family and --kernels: choose one, and"):
        run("new-plugin", "both", "--family", "--kernels", "--folder", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
